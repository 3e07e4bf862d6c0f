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

from jgt.api.draws import draws
from jgt.api.reference import Reference
from jgt.api.stepwise import Evaluation, Path, all_equations, whole_call
from jgt.api.verify import TOLERANCE, Difference, Verification
from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.program.equations import param_items
from jgt.program.tracing import evaluate, trace
from jgt.sharding.inputs import named_leaves, path_text
from jgt.sharding.partitioner import avoided_faults

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


def verify_jit(
    fn: Callable[..., object],
    *args: object,
    in_shardings: Any = None,
    out_shardings: Any = None,
    mesh: Mesh | None = None,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compares a function as it is laid out, by whatever means of JAX, with its operations one by one on one device.

        found = jgt.verify_jit(step, params, batch, in_shardings=(param_shardings, batch_sharding))
        assert found.is_right, str(found)

    The results and the gradients of floating arguments are compared.

    fn: a function, or one that is jitted.
    args: arrays, laid out as they should be, or ShapeDtypeStructs (with `sharding`, if they have one), for which numbers are drawn:
    integers that start slices reach the ends of what they slice, and beyond (`draws.py`).
    in_shardings, out_shardings: as for `jax.jit`.
    mesh: needed only for shardings that are PartitionSpecs.
    tolerance: the largest difference that needs no explanation, as a share of an array's largest number. A larger one counts if it is also
    many times what rounding may change: what noise in the last places of all results changes is the measure.

    The message names the first operation whose value, or else whose cotangent, differs, with its line.

    Raises InputError if an argument is not an array, if no mesh is known, or if `mesh` is not the function's.
    """
    started = time.perf_counter()
    leaves, tree = named_leaves(args)
    strange = [f"argument {path_text(path)} is of type {type(x).__name__}" for path, x in leaves if not isinstance(x, _ARRAYS)]
    if strange:
        raise InputError([f"verify_jit: {what}. Arguments are trees of arrays: bind others with functools.partial" for what in strange])
    is_plain = in_shardings is None and out_shardings is None
    jitted: Any = fn if is_plain and hasattr(fn, "lower") else jax.jit(fn, in_shardings=in_shardings, out_shardings=out_shardings)

    def flat(*arrays: jax.Array) -> object:
        return jitted(*jax.tree.unflatten(tree, arrays))

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh), avoided_faults() as avoided:
        program, out_tree = trace(flat, *(x for _, x in leaves))
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
    """A traced function, and with its gradients.

    What else a program returns may change the layouts inside, so three are compared: the function, `whole`, which has its results and
    gradients, and the gradients alone. given: the arguments. into, out: the shardings of the arguments and of the
    results. names: the names of what `whole` returns.
    """

    forward: jx.Program
    whole: jx.Program
    given: Sequence[jax.Array | jax.ShapeDtypeStruct]
    into: Sequence[NamedSharding | None]
    out: Sequence[jax.sharding.Sharding | None]
    names: Sequence[str]
    device: Any
    left_out: tuple[str, ...]

    @classmethod
    def of(
        cls,
        program: jx.Program,
        given: Sequence[jax.Array | jax.ShapeDtypeStruct],
        mesh: Mesh | None,
        arguments: Sequence[str],
        results: Sequence[str],
    ) -> _Compared:
        """Takes a program apart, and traces its gradient. arguments, results: their names. Raises InputError."""
        inner, into, out = whole_call(program) or (program, [None] * len(given), [None] * len(results))
        into = [s or getattr(x, "sharding", None) for s, x in zip(into, given, strict=True)]
        into = [s if isinstance(s, NamedSharding) else None for s in into]
        device = _mesh_of(inner, [*into, *out], mesh).devices.flat[0]
        real = [n for n, x in enumerate(given) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
        outputs = [n for n, var in enumerate(jx.body(inner).outvars) if jx.is_real(var)]
        names, whole, left_out = [f"result {name}".rstrip() for name in results], inner, list[str]()
        if real and outputs:
            try:
                whole = _with_gradients(inner, given, real, outputs)
                names += [f"gradient of argument {arguments[n]}" for n in real]
            except (NotImplementedError, ValueError) as error:
                left_out.append(f"gradients, which JAX cannot compute: {str(error).splitlines()[0]}")
        return cls(
            forward=inner,
            whole=whole,
            given=given,
            into=into,
            out=out,
            names=names,
            device=device,
            left_out=tuple(left_out),
        )

    def outcome(self, tolerance: float) -> tuple[dict[str, float], tuple[Difference, ...], str]:
        """The largest errors by name, what differs, and the first operation that does."""
        count = len(self.names)
        programs = {self.whole: range(count), self.forward: range(len(self.out))}
        if self.whole is not self.forward:
            backward = range(len(self.out), count)
            programs[jx.with_results(self.whole, backward)] = backward
        compiled = {program: self._compiled(program, numbers) for program, numbers in programs.items()}
        largest = dict.fromkeys(self.names, 0.0)
        for arrays in draws(self.forward, self.given):
            reference = Reference(self.whole, arrays, self.device, self.names)
            placed = [x if s is None else jax.device_put(x, s) for s, x in zip(self.into, arrays, strict=True)]
            wrong, first = dict[str, Difference](), ""
            for program, numbers in programs.items():
                found = {self.names[n]: x for n, x in zip(numbers, compiled[program](placed)[0], strict=True)}
                errors, names = reference.judge(found, tolerance)
                largest |= {name: max(error, largest[name]) for name, error in errors.items()}
                wrong |= {name: Difference.of(name, errors[name], reference.results[name], found[name]) for name in {*names} - wrong.keys()}
                if names and not first:
                    values = self._compiled(program, numbers, keeps=True)(placed)[1]
                    first = Reference(program, arrays, self.device).first_wrong(values, tolerance)
            if wrong:
                return largest, tuple(wrong[name] for name in self.names if name in wrong), first
        return largest, (), ""

    def _compiled(self, program: jx.Program, numbers: Sequence[int], *, keeps: bool = False) -> Callable[[Sequence[jax.Array]], Any]:
        def run(arrays: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Mapping[Path, Sequence[jax.Array]]]:
            if not keeps:
                return evaluate(program, arrays), {}
            evaluation = Evaluation(is_eager=False, keeps=True)
            return evaluation.run(program, arrays), evaluation.values

        out = [self.out[n] if n < len(self.out) else None for n in numbers]
        return cast(Any, jax.jit(run, out_shardings=(out, None)))


def _with_gradients(
    program: jx.Program, given: Sequence[jax.Array | jax.ShapeDtypeStruct], real: Sequence[int], outputs: Sequence[int]
) -> jx.Program:
    """A program that returns also the gradients by these arguments, of the sum of these results with weights of both signs."""

    def both(*arrays: jax.Array) -> list[jax.Array]:
        def total(moved: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
            new = dict(zip(real, moved, strict=True))
            results = evaluate(program, [new.get(n, x) for n, x in enumerate(arrays)])
            # Made inside, as a loss makes them: XLA would choose the layout of a further argument.
            weights = [jnp.cos(jnp.arange(results[n].size) + n).reshape(results[n].shape).astype(results[n].dtype) for n in outputs]
            return sum(jnp.sum(results[n] * weight) for n, weight in zip(outputs, weights, strict=True)), results

        gradients, results = cast(Any, jax.grad(total, has_aux=True))([arrays[n] for n in real])
        return [*results, *gradients]

    return trace(both, *given)[0]


def _mesh_of(program: jx.Program, shardings: Sequence[jax.sharding.Sharding | None], mesh: Mesh | None) -> Mesh:
    """The mesh of a function. Raises InputError if it has none or several."""
    inside = [value for equation in all_equations(program) for value in param_items(equation)]
    named = [s.mesh for s in [*shardings, *inside] if isinstance(s, NamedSharding)]
    found = {m for m in [*named, *inside, mesh] if isinstance(m, Mesh) and m.shape}
    if len({tuple(m.shape.items()) for m in found}) > 1:
        names = " and ".join(sorted(" x ".join(f"{axis}={size}" for axis, size in m.shape.items()) for m in found))
        raise InputError([f"verify_jit: the function and its arguments name several meshes, {names}. Use one mesh"])
    if not found:
        raise InputError(["verify_jit: nothing names a mesh. Give arguments with shardings, in_shardings, or mesh"])
    return found.pop()
