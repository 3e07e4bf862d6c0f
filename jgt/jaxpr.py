"""All that jgt knows of the inside of JAX's traced programs; what a new JAX may change stands here.

No primitive is taken apart: sub-programs are found in an equation's params and replaced in place, signature kept, so
scan, while, cond, jit, remat and shard_map need no code of their own. What must be recognised is recognised by the
params it carries. jax 0.10 has Jaxpr and ClosedJaxpr, jax 0.12 one Jaxpr; both are handled by `body` and `with_body`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.extend.linear_util as lu
from jax._src import source_info_util
from jax._src.core import JaxprEqnContext, get_axis_env
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.signal import PREFIX

Program = Any  # a Jaxpr or a ClosedJaxpr
Equation = Any  # a JaxprEqn
Var = Any


@dataclass(frozen=True)
class Place:
    """Where an equation stands: the signals around it, outermost first, and how many vmaps it was traced under."""

    signals: tuple[str, ...] = ()
    num_vmaps: int = 0

    @property
    def path(self) -> str:
        """The signals as a path: layers/attn."""
        return "/".join(self.signals)

    def inside(self, signals: tuple[str, ...]) -> bool:
        """Whether this place lies in the region that these signals name."""
        return self.signals[: len(signals)] == signals


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """The program of `fn` at arrays or ShapeDtypeStructs, and the tree of its outputs."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return program, jax.tree.structure(shapes)


def evaluate(program: Program, args: Sequence[Any]) -> list[Any]:
    """Runs a program on arrays or tracers, under whatever transformation is active."""
    return jex.jaxpr_as_fun(program)(*args)


def body(program: Program) -> Any:
    """The part of a program that has eqns, invars and outvars."""
    return program.jaxpr if isinstance(program, jex.ClosedJaxpr) and hasattr(program, "jaxpr") else program


def with_body(program: Program, *, eqns: Sequence[Equation], outvars: Sequence[Var]) -> Program:
    """The same program, same signature, with other equations and outputs."""
    inner = body(program).replace(eqns=list(eqns), outvars=list(outvars))
    return inner if body(program) is program else program.replace(jaxpr=inner)


def constants(program: Program) -> dict[Var, Any]:
    """The arrays that a program closes over, by variable."""
    return dict(zip(body(program).constvars, getattr(program, "consts", ()), strict=True))


def program_of(like: Program, invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Any]) -> Program:
    """A program of its own, made of equations of another; it closes over nothing."""
    inner = body(like)
    info = inner.debug_info.with_unknown_names()
    inner = inner.replace(constvars=[], invars=list(invars), eqns=list(eqns), outvars=list(outvars), debug_info=info)
    return inner if body(like) is like else jex.ClosedJaxpr(inner, [])


def fresh(var: Var) -> Var:
    """A new variable like another one."""
    return type(var)(var.aval)


def moved(equation: Equation, into: Equation, rename: Mapping[Var, Any], outvars: Sequence[Var]) -> Equation:
    """An equation of the program that the call `into` holds, as it stands in the program around: renamed, signals prefixed."""
    info = equation.source_info if source_of(equation) else into.source_info
    invars = [rename.get(a, a) if is_var(a) else a for a in equation.invars]
    stack = into.source_info.name_stack + equation.source_info.name_stack
    return equation.replace(invars=invars, outvars=list(outvars), source_info=info.replace(name_stack=stack))


def is_call(equation: Equation) -> bool:
    """Whether an equation is a jax.jit inside the program, which means nothing but its content."""
    return {"jaxpr", "donated_invars", "inline"} <= equation.params.keys()


def key_kind(aval: Any) -> str:
    """The generator of a typed random key, as jax.random.wrap_key_data takes it."""
    return aval.dtype._impl.name


def is_random_key(program: Program, index: int) -> bool:
    """Whether random numbers are drawn from an argument of a program: its bits are made a key."""
    reached = {body(program).invars[index]}
    for equation in body(program).eqns:
        if not any(is_var(a) and a in reached for a in equation.invars):
            continue
        if equation.primitive.name in ("random_wrap", "threefry2x32"):
            return True
        for inner in subprograms(equation):
            if any(o in reached and is_random_key(inner, i) for i, o in enumerate(operands(equation, inner)) if o is not None and is_var(o)):
                return True
        reached.update(equation.outvars)
    return False


def draws(equation: Equation) -> Iterator[Var]:
    """The random bits that an equation draws, also in the programs inside of it."""
    if equation.primitive.name in ("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"):
        yield from equation.outvars
    for program in subprograms(equation):
        for inner in body(program).eqns:
            yield from draws(inner)


def scan_sizes(equation: Equation) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many carry; the rest is scanned over."""
    # Told from ranks: JAX 0.10 has num_consts and num_carry, later versions keep trees.
    inner = body(equation.params["jaxpr"])
    num_scanned = sum(_rank(o) > _rank(i) for o, i in zip(equation.invars, inner.invars, strict=True))
    num_carry = sum(_rank(o) == _rank(i) for o, i in zip(equation.outvars, inner.outvars, strict=True))
    return len(inner.invars) - num_scanned - num_carry, num_carry


def depends(fn: Callable[..., Any], args: Any, rest: Any) -> bool:
    """Whether any result of fn(args, rest) depends on an array of args."""
    program = trace(fn, args, rest)[0]
    inner = body(program)
    reached = set(inner.invars[: len(jax.tree.leaves(args))])
    for equation in inner.eqns:
        if any(is_var(a) and a in reached for a in equation.invars):
            reached.update(equation.outvars)
    return any(is_var(a) and a in reached for a in inner.outvars)


def source_of(equation: Equation) -> str:
    """The user's file:line that an equation comes from; nothing for what JAX traced for itself."""
    text = source_info_util.summarize(equation.source_info)
    return "" if text == source_info_util.summarize(source_info_util.new_source_info()) else text


def line_of(equation: Equation) -> str:
    """The file:line of the innermost user code that an equation comes from, outside of installed packages if there is any."""
    frames = source_info_util.user_frames(equation.source_info.traceback)
    lines = [f"{frame.file_name}:{frame.start_line}" for frame in frames]
    own = next((line for line in lines if "site-packages" not in line), lines[0] if lines else "")
    return own.removeprefix(f"{Path.cwd()}/")


def place_of(equation: Equation, around: Place) -> Place:
    """The place of an equation of a program that itself stands at `around`."""
    signals, num_vmaps = list(around.signals), around.num_vmaps
    for element in equation.source_info.name_stack.stack:
        if element.name.startswith(PREFIX):
            signals.append(element.name.removeprefix(PREFIX))
        elif type(element).__name__ == "Transform" and element.name == "vmap":
            num_vmaps += 1
    return Place(tuple(signals), num_vmaps)


def subprograms(equation: Equation) -> Iterator[Program]:
    """Every program in an equation's params."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr):
                yield item


def map_subprograms(equation: Equation, change: Callable[[Program], Program]) -> dict[str, Any] | None:
    """An equation's params with every program in them changed; None when `change` returned each as it was."""
    params, changed = dict(equation.params), False
    for key, value in equation.params.items():
        items = value if isinstance(value, tuple | list) else (value,)
        if not any(isinstance(item, jex.Jaxpr | jex.ClosedJaxpr) for item in items):
            continue
        new = [change(item) if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr) else item for item in items]
        if any(a is not b for a, b in zip(new, items, strict=True)):
            changed = True
            params[key] = type(value)(new) if isinstance(value, tuple | list) else new[0]
    if not changed:
        return None
    _map_rules(params, change)
    return params


def _map_rules(params: dict[str, Any], change: Callable[[Program], Program]) -> None:
    # custom_jvp and custom_vjp carry their derivative as a function that returns (jaxpr, consts, ...) when asked.
    for key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if key in params:
            params[key] = lu.wrap_init(_changed_rule(params[key], change), debug_info=params[key].debug_info)


def _changed_rule(rule: Any, change: Callable[[Program], Program]) -> Callable[..., Any]:
    def changed(*zeros: Any) -> Any:
        program, *rest = rule.call_wrapped(*zeros)
        return (change(program), *rest)

    return changed


def operands(equation: Equation, program: Program) -> list[Var | None]:
    """The equation's operand behind each argument of a program in it.

    A program takes all operands (scan, jit, remat, shard_map, custom rules) or the last of them (cond leaves out the
    index); while says which are whose. None where shapes say that the guess is wrong.
    """
    invars = body(program).invars
    outer = list(equation.invars)
    if "cond_nconsts" in equation.params:
        ours, theirs = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        is_condition = program is equation.params["cond_jaxpr"]
        outer = outer[:ours] + outer[ours + theirs :] if is_condition else outer[ours:]
    outer = outer[-len(invars) :] if invars else []
    if len(outer) < len(invars):
        return [None] * len(invars)
    return [o if _rank(o) - _rank(i) in (0, 1) else None for o, i in zip(outer, invars, strict=True)]


def results(equation: Equation, program: Program) -> list[Var | None]:
    """The equation's result behind each output of a program in it; None where they do not correspond."""
    outvars = body(program).outvars
    if len(outvars) != len(equation.outvars):
        return [None] * len(outvars)
    return list(equation.outvars)


def kept(program: Program) -> list[int | None]:
    """For each output of a program the argument that it is, unchanged; None for what was computed."""
    inner = body(program)
    origin = {var: index for index, var in enumerate(inner.invars)}
    for equation in inner.eqns:
        found = [_kept_through(equation, p) for p in subprograms(equation) if len(body(p).outvars) == len(equation.outvars)]
        for out, *atoms in zip(equation.outvars, *found, strict=True):
            if atoms and all(a is not None and a is atoms[0] and a in origin for a in atoms):
                origin[out] = origin[atoms[0]]
    return [origin.get(atom) if is_var(atom) else None for atom in inner.outvars]


def _kept_through(equation: Equation, program: Program) -> list[Var | None]:
    given = operands(equation, program)
    atoms = [None if index is None else given[index] for index in kept(program)]
    return [a if a is not None and is_var(a) else None for a in atoms]


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def is_var(atom: Any) -> bool:
    """Whether an operand is a variable rather than a literal."""
    return not isinstance(atom, jex.Literal)


def is_dropped(var: Var) -> bool:
    """Whether an equation's result is never used."""
    return isinstance(var, jex.DropVar)


def is_scan(equation: Equation) -> bool:
    """Whether an equation is a loop of known length that backward passes go through."""
    return {"jaxpr", "length", "reverse"} <= equation.params.keys()


def is_remat(equation: Equation) -> bool:
    """Whether an equation is a jax.checkpoint region."""
    return {"jaxpr", "policy", "prevent_cse"} <= equation.params.keys()


def tensor_name(equation: Equation) -> str | None:
    """The name that `signal.tensor` (or checkpoint_name) gave to the result; None for any other equation."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def is_name(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether a remat policy is being asked about a named value."""
    return primitive.name == "name" and "name" in params


def vmapped_axes() -> frozenset[str]:
    """The mesh axes that vmaps around the current trace claim (spmd_axis_name): constraints may not name them."""
    return frozenset(get_axis_env().spmd_axis_names)


def mesh_around() -> AbstractMesh | None:
    """The mesh of the shard_map that the current trace is in; None outside of any."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.manual_axes else None


def manual_mesh(equation: Equation) -> AbstractMesh | None:
    """The mesh of the shard_map that an equation was traced in; None outside of any."""
    mesh = equation.ctx.cur_abstract_mesh
    return mesh if mesh.manual_axes else None


def pinned(x: jax.Array, forward: NamedSharding | None, backward: NamedSharding) -> jax.Array:
    """A value with its sharding (None: as it is), and its cotangent with another."""
    pin = jax.lax.with_sharding_constraint
    if forward == backward:
        return pin(x, forward)

    def ahead(x: jax.Array) -> jax.Array:
        return x if forward is None else pin(x, forward)

    identity = jax.custom_vjp(ahead)
    identity.defvjp(lambda x: (ahead(x), None), lambda _, cotangent: (pin(cotangent, backward),))
    return identity(x)


def constrained(
    var: Var, forward: NamedSharding | None, backward: NamedSharding, like: Equation | None
) -> tuple[list[Equation], Var]:
    """Equations that pin a value to `forward` (None: leave it be) and its cotangent to `backward`, and the pinned variable.

    They stand where `like` does: same signals, and same mesh context where that is a shard_map's.
    """
    context = _nothing if like is None or manual_mesh(like) is None else lambda: like.ctx.manager
    if forward == backward:
        with context():
            program = jax.make_jaxpr(lambda x: pinned(x, forward, backward))(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
        # Same aval as before (weak type, varying axes): only the constraint's own equation is taken over.
        new = type(body(program).outvars[0])(var.aval)
        equation = body(program).eqns[0].replace(invars=[var], outvars=[new])
        return [_like(equation, like)], new

    with context():
        program = jax.make_jaxpr(lambda x: pinned(x, forward, backward))(var.aval)
    inner = body(program)
    rename = {inner.invars[0]: var}
    eqns = [e.replace(invars=[rename.get(a, a) if is_var(a) else a for a in e.invars]) for e in inner.eqns]
    return [_like(e, like) for e in eqns], inner.outvars[0]


def _like(equation: Equation, like: Equation | None) -> Equation:
    return equation if like is None else equation.replace(source_info=like.source_info)


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def checkpointed(program: Program, policy: Callable[..., Any], *, in_scan: bool) -> Program:
    """The same program inside jax.checkpoint with this policy."""
    fn = jax.checkpoint(jex.jaxpr_as_fun(program), policy=policy, prevent_cse=not in_scan)
    return jax.make_jaxpr(fn)(*[v.aval for v in body(program).invars])


def is_float(atom: Any) -> bool:
    """Whether an operand or result has derivatives: it holds real numbers."""
    return jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.floating)


def is_inexact(atom: Any) -> bool:
    """Whether it holds real or complex numbers."""
    return jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.inexact)


def is_integer(atom: Any) -> bool:
    """Whether it holds whole numbers."""
    return jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.integer)


def has_own_derivative(equation: Equation) -> bool:
    """Whether an equation is a call of a jax.custom_jvp or jax.custom_vjp function."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def backward_of(equation: Equation) -> Program:
    """The backward pass of one equation: its operands and the cotangents of its float results → those of its float operands.

    Literals are no operands of it, and results that are never used have no cotangent.
    """
    invars = list(dict.fromkeys(a for a in equation.invars if is_var(a)))
    outvars = [v for v in equation.outvars if not is_dropped(v)]
    floats = [is_float(v) for v in invars]
    run = jex.jaxpr_as_fun(program_of(next(subprograms(equation)), invars, [equation], outvars))

    def backward(args: list[Any], cotangents: list[Any]) -> Any:
        def forward(given: list[Any]) -> list[Any]:
            left = iter(given)
            found = run(*[next(left) if f else x for f, x in zip(floats, args, strict=True)])
            return [x for x, v in zip(found, outvars, strict=True) if is_float(v)]

        return jax.vjp(forward, [x for f, x in zip(floats, args, strict=True) if f])[1](cotangents)[0]

    return trace(backward, [v.aval for v in invars], [v.aval for v in outvars if is_float(v)])[0]


@dataclass(frozen=True)
class Jitted:
    """A program that is one jit call: what is in it, and its arguments' and results' shardings; None: not given."""

    program: Program
    in_shardings: tuple[NamedSharding | None, ...]
    out_shardings: tuple[NamedSharding | None, ...]
    donated: tuple[bool, ...]


def jitted(program: Program) -> Jitted:
    """A program as a jit call: the one that it consists of, or one around it."""
    inner = body(program)
    called = inner.eqns[0] if len(inner.eqns) == 1 else None
    if called is not None and is_call(called) and list(called.invars) == list(inner.invars) and list(called.outvars) == list(inner.outvars):
        params = called.params
        return Jitted(params["jaxpr"], _named(params["in_shardings"]), _named(params["out_shardings"]), tuple(params["donated_invars"]))
    num = len(inner.invars)
    return Jitted(program, (None,) * num, (None,) * len(inner.outvars), (False,) * num)


def _named(shardings: Sequence[Any]) -> tuple[NamedSharding | None, ...]:
    return tuple(s if isinstance(s, NamedSharding) else None for s in shardings)


def meshes(program: Program) -> Iterator[Mesh | AbstractMesh]:
    """Every mesh that a program names."""
    for equation in body(program).eqns:
        for value in equation.params.values():
            yield from _meshes_in(value)
        for inner in subprograms(equation):
            yield from meshes(inner)


def _meshes_in(value: Any) -> Iterator[Mesh | AbstractMesh]:
    for item in value if isinstance(value, tuple | list) else (value,):
        mesh = item.mesh if isinstance(item, NamedSharding) else item
        if isinstance(mesh, Mesh | AbstractMesh) and mesh.axis_names:
            yield mesh


def onto_mesh(program: Program, mesh: Mesh) -> Program:
    """The same program on other devices: `mesh` has the axes of the mesh that it names."""
    eqns = []
    for equation in body(program).eqns:
        params = map_subprograms(equation, lambda p: onto_mesh(p, mesh)) or dict(equation.params)
        params = {key: _onto(value, mesh) for key, value in params.items()}
        eqns.append(equation.replace(params=params, ctx=_context_on(equation, mesh)))
    return with_body(program, eqns=eqns, outvars=body(program).outvars)


def _context_on(equation: Equation, mesh: Mesh) -> JaxprEqnContext:
    """An equation's context with the other mesh's kind of device: inside a shard_map the context names the mesh too."""
    around = equation.ctx.cur_abstract_mesh
    if not around.axis_names:
        return equation.ctx
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(around.update(abstract_device=mesh.abstract_mesh.abstract_device)):
        return JaxprEqnContext()


def _onto(value: Any, mesh: Mesh) -> Any:
    if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
        return value.update(mesh=mesh) if hasattr(value, "update") else NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
    if isinstance(value, Mesh):
        return mesh
    if isinstance(value, tuple | list) and any(isinstance(item, Mesh | NamedSharding) for item in value):
        return type(value)(_onto(item, mesh) for item in value)
    return value
