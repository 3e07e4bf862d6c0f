"""`verify_jit`: does the layout of a jitted function change its numbers? The compiled program against its operations one by one.

The function needs no rules of jgt: its layout is the one that its author wrote, in `with_sharding_constraint`, in the shardings of its
arguments, in `in_shardings` and `out_shardings`. The program and its gradient are traced once. Compiled for the mesh, the trace is what
would run. Evaluated operation by operation on one device, without the constraints, it says what is right (`jgt.api.stepwise`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jgt.api.draws import draws, noise
from jgt.api.reference import Reference
from jgt.api.stepwise import Evaluation, Path, all_equations, whole_call
from jgt.api.verify import TOLERANCE, Difference, Verification
from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.sharding.inputs import named_leaves, path_text
from jgt.sharding.partitioner import avoided_faults

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


def verify_jit(
    fn: Callable[..., Any],
    *args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    mesh: Mesh | None = None,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compares a function as it is laid out, by whatever means of JAX, with its operations one by one on one device.

        found = jgt.verify_jit(step, params, batch, in_shardings=(param_shardings, batch_sharding))
        assert found.is_right, str(found)

    The results and the gradients of floating arguments are compared. fn: a function, or one that is jitted; in_shardings, out_shardings:
    as for `jax.jit`. args: arrays, laid out as they should be, or ShapeDtypeStructs (with `sharding`, if they have one), for which numbers
    are drawn: integers that start slices reach the ends of what they slice, and beyond (`draws.py`). mesh: needed only for shardings that
    are PartitionSpecs. tolerance: the largest difference that needs no explanation, as a share of an array's largest number. A larger one
    counts if it is also many times what rounding may change: what noise in the last places of all results changes is the measure.

    The message names the first operation whose value, or else whose cotangent, differs, with its line.

    Raises InputError for an argument that is no array, no mesh at all, and one that is not the function's.
    """
    started = time.perf_counter()
    leaves, tree = named_leaves(args)
    strange = [f"argument {path_text(path)} is of type {type(x).__name__}" for path, x in leaves if not isinstance(x, _ARRAYS)]
    if strange:
        raise InputError([f"verify_jit: {what}. Arguments are trees of arrays: bind others with functools.partial" for what in strange])
    is_plain = in_shardings is None and out_shardings is None
    jitted: Any = fn if is_plain and hasattr(fn, "lower") else jax.jit(fn, in_shardings=in_shardings, out_shardings=out_shardings)

    def flat(*arrays: Any) -> Any:
        return jitted(*jax.tree.unflatten(tree, arrays))

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh), avoided_faults() as avoided:
        program, out_tree = jx.trace(flat, *(x for _, x in leaves))
        paths = [path_text(path) for path, _ in named_leaves(jax.tree.unflatten(out_tree, range(out_tree.num_leaves)))[0]]
        compared = _Compared.of(program, [x for _, x in leaves], mesh, [path_text(path) for path, _ in leaves], paths)
        errors, differences, first = compared.outcome(tolerance)
    return Verification(
        differences=differences,
        first=first,
        num_compared=len(errors),
        largest=max(errors.values(), default=0.0),
        avoided=tuple(dict.fromkeys(avoided)),
        left_out=compared.left_out,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A traced function, and its gradient behind it if it has one. given: its arguments. shardings: of arguments and of results."""

    forward: jx.Program
    whole: jx.Program
    given: Sequence[Any]
    cotangents: Sequence[Any]
    shardings: tuple[Sequence[Any], Sequence[Any]]
    names: Sequence[str]
    device: Any
    left_out: tuple[str, ...]

    @classmethod
    def of(
        cls, program: jx.Program, given: Sequence[Any], mesh: Mesh | None, arguments: Sequence[str], results: Sequence[str]
    ) -> _Compared:
        """Takes a program apart, and traces its gradient. arguments, results: their names. Raises InputError."""
        inner, *shardings = whole_call(program) or (program, [None] * len(given), [None] * len(results))
        into = [s or getattr(x, "sharding", None) for s, x in zip(shardings[0], given, strict=True)]
        into = [s if isinstance(s, NamedSharding) else None for s in into]
        device = _mesh_of(inner, [*into, *shardings[1]], mesh).devices.flat[0]
        real = [n for n, x in enumerate(given) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
        outputs = [n for n, var in enumerate(jx.body(inner).outvars) if jx.is_real(var)]
        cotangents = [noise(jx.shape_of(jx.body(inner).outvars[n]), jx.dtype_of(jx.body(inner).outvars[n]), n) for n in outputs]
        names, whole, left_out = [f"result {name}".rstrip() for name in results], inner, list[str]()
        if real and outputs:
            try:
                whole = _with_gradients(inner, given, real, outputs, cotangents)
                names += [f"gradient of argument {arguments[n]}" for n in real]
            except (NotImplementedError, ValueError) as error:
                left_out.append(f"gradients, which JAX cannot compute: {str(error).splitlines()[0]}")
        return cls(
            forward=inner,
            whole=whole,
            given=given,
            cotangents=cotangents if whole is not inner else [],
            shardings=(into, shardings[1]),
            names=names,
            device=device,
            left_out=tuple(left_out),
        )

    def outcome(self, tolerance: float) -> tuple[dict[str, float], tuple[Difference, ...], str]:
        """The largest errors by name, what differs, and the first operation that does."""
        compiled = {id(program): self._compiled(program) for program in (self.forward, self.whole)}
        largest = dict.fromkeys(self.names, 0.0)
        for arrays in draws(self.forward, self.given):
            reference = Reference(self.whole, [*arrays, *self.cotangents], self.device)
            wrong, programs = dict[str, Difference](), list[jx.Program]()
            # What else a program returns may change its layout, so the results are compared without gradients, too.
            for program in (self.whole, self.forward):
                found = dict(zip(self.names, self._found(compiled[id(program)], program, arrays), strict=False))
                errors, names = reference.judge([*found], [*found.values()], tolerance)
                largest |= {name: max(error, largest[name]) for name, error in errors.items()}
                expected = dict(zip(self.names, reference.results, strict=True))
                wrong |= {name: Difference.of(name, errors[name], expected[name], found[name]) for name in names if name not in wrong}
                programs += [program] if names else []
            if wrong:
                first = (self._first(program, arrays, tolerance) for program in programs)
                return largest, tuple(wrong[name] for name in self.names if name in wrong), next(filter(None, first), "")
        return largest, (), ""

    def _compiled(self, program: jx.Program, *, keeps: bool = False) -> Callable[[Sequence[Any]], Any]:
        more = [None] * (len(jx.body(program).outvars) - len(self.shardings[1]))

        def run(arrays: Sequence[Any]) -> tuple[Sequence[Any], Mapping[Path, Sequence[Any]]]:
            if not keeps:
                return jx.evaluate(program, arrays), {}
            evaluation = Evaluation(is_eager=False, keeps=True)
            return evaluation.run(program, arrays), evaluation.values

        return cast(Any, jax.jit(run, out_shardings=([*self.shardings[1], *more], None)))

    def _found(self, compiled: Any, program: jx.Program, arrays: Sequence[Any], *, values: bool = False) -> Any:
        placed = [x if s is None else jax.device_put(x, s) for s, x in zip(self.shardings[0], arrays, strict=True)]
        found = compiled([*placed, *([] if program is self.forward else self.cotangents)])
        return found[1] if values else found[0]

    def _first(self, program: jx.Program, arrays: Sequence[Any], tolerance: float) -> str:
        found = self._found(self._compiled(program, keeps=True), program, arrays, values=True)
        operands = arrays if program is self.forward else [*arrays, *self.cotangents]
        return Reference(program, operands, self.device).first_wrong(found, tolerance)


def _with_gradients(program: jx.Program, given: Sequence[Any], real: Sequence[int], outputs: Sequence[int], cotangents: Any) -> jx.Program:
    """A program that returns also the gradients by these arguments, of these results weighed by further arguments."""

    def both(*operands: Any) -> Any:
        arrays, weights = operands[: len(given)], operands[len(given) :]

        def of_real(moved: Sequence[Any]) -> Any:
            new = dict(zip(real, moved, strict=True))
            results = jx.evaluate(program, [new.get(n, x) for n, x in enumerate(arrays)])
            return [results[n] for n in outputs], results

        _, pull, results = cast(Any, jax.vjp(of_real, [arrays[n] for n in real], has_aux=True))
        return [*results, *pull(list(weights))[0]]

    return jx.trace(both, *given, *cotangents)[0]


def _mesh_of(program: jx.Program, shardings: Sequence[Any], mesh: Mesh | None) -> Mesh:
    """The mesh of a function. Raises InputError if it has none or several."""
    inside = [value for equation in all_equations(program) for value in jx.param_items(equation)]
    named = [s.mesh for s in [*shardings, *inside] if isinstance(s, NamedSharding)]
    found = {m for m in [*named, *inside, mesh] if isinstance(m, Mesh) and m.shape}
    if len({tuple(m.shape.items()) for m in found}) > 1:
        names = " and ".join(sorted(" x ".join(f"{axis}={size}" for axis, size in m.shape.items()) for m in found))
        raise InputError([f"verify_jit: the function and its arguments name several meshes, {names}. Use one mesh"])
    if not found:
        raise InputError(["verify_jit: nothing names a mesh. Give arguments with shardings, in_shardings, or mesh"])
    return found.pop()
