# pyright: basic
"""Everything that jgt knows about the internals of JAX's traced programs.

JAX traces a function to a jaxpr: a list of equations, some of which carry programs of their own in their params (scan,
while, cond, jit, checkpoint, shard_map, custom derivatives). jgt has to find and replace those programs without breaking
the equation around them, and JAX offers no public way to do so. This is the one file that may break with a new version
of JAX; tests/program/test_jaxpr.py checks each fact that it relies on.

The idea is never to take a primitive apart. A program is found in an equation's params by its type and is replaced in place by one
with the same signature, so that no kind of nesting needs its own code. Where a kind must be recognised (is it a scan? a
checkpoint?), the names of its params decide, because they change less often than the primitive's name. jax 0.10 has two
classes, Jaxpr and ClosedJaxpr, where jax 0.12 has one; `body` and `with_body` hide the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.extend.core as jex
import jax.extend.linear_util as lu
from jax._src import config, source_info_util
from jax._src.core import JaxprEqnContext, get_axis_env
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from jgt.program.scopes import MICROBATCH, PREFIX

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Program = jex.Jaxpr | jex.ClosedJaxpr
"""A traced program; jax 0.12 has one class for both."""

Equation = jex.JaxprEqn
Var = jex.Var
Atom = jex.Var | jex.Literal
"""An operand of an equation, or an output of a program."""


@dataclass(frozen=True)
class Place:
    """Where an equation is in the model: the signals around it, outermost first, and how many vmaps it was traced under.

    A vmap adds a leading dim to every value below it that the model's author does not see, so rules must not count it.
    of_microbatch: the model says that values there are meant of one microbatch.
    """

    signals: tuple[str, ...] = ()
    num_vmaps: int = 0
    of_microbatch: bool = False

    @property
    def path(self) -> str:
        """The signals as a path, such as layers/attn."""
        return "/".join(self.signals)

    def inside(self, signals: tuple[str, ...]) -> bool:
        """Whether this place is in the region that these signals name."""
        return self.signals[: len(signals)] == signals


# Programs


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Traces `fn` at arrays or ShapeDtypeStructs. Returns its program and the tree of its outputs."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return program, jax.tree.structure(shapes)


def trace_context() -> Hashable:
    """Everything around the active trace that a traced program depends on: x64, default precision, meshes, vmapped axes.

    Equal for two traces that would give the same program; JAX keys its own caches with it.
    """
    return config.trace_context()


def closes_over_tracers(program: Program) -> bool:
    """Whether a program contains values of a trace around it, which mean nothing after that trace."""
    return any(isinstance(value, Tracer) for value in constants(program).values())


def evaluate(program: Program, args: Sequence[ArrayLike]) -> list[jax.Array]:
    """Runs a program on arrays or tracers, under whatever transformation is active."""
    closed = program if hasattr(program, "consts") else jex.ClosedJaxpr(body(program), [])
    return jex.jaxpr_as_fun(closed)(*args)


def result_of(equation: Equation, *operands: jax.Array, **params: Any) -> jax.Array:
    """The result that an equation of one result has for these operands. params: those that change."""
    return equation.primitive.bind(*operands, **{**equation.params, **params})


def body(program: Program) -> jex.Jaxpr:
    """The part of a program that has eqns, invars and outvars."""
    inner = program.jaxpr if isinstance(program, jex.ClosedJaxpr) and hasattr(program, "jaxpr") else program
    return cast(jex.Jaxpr, inner)


def with_body(program: Program, *, eqns: Sequence[Equation], outvars: Sequence[Atom]) -> Program:
    """The same program with other equations and outputs; the new outputs must have the avals of the old ones."""
    inner = body(program).replace(eqns=list(eqns), outvars=list(outvars))
    return inner if body(program) is program else program.replace(jaxpr=inner)


def constants(program: Program) -> dict[Var, ArrayLike]:
    """The arrays that a program closes over, by variable."""
    return dict(zip(body(program).constvars, getattr(program, "consts", ()), strict=True))


def program_of(like: Program, invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]) -> Program:
    """A new program made of equations of `like`. It closes over nothing: `invars` must include the constants it reads."""
    inner = body(like)
    # The debug info of `like` names arguments and results that the new program does not have.
    info = inner.debug_info.with_unknown_names()
    inner = inner.replace(constvars=[], invars=list(invars), eqns=list(eqns), outvars=list(outvars), debug_info=info)
    return inner if body(like) is like else jex.ClosedJaxpr(inner, [])


def with_results(program: Program, which: Sequence[int]) -> Program:
    """The same program with only these of its outputs, by number."""
    inner = body(program)
    info = inner.debug_info.with_unknown_names()
    changed = inner.replace(outvars=[inner.outvars[n] for n in which], debug_info=info)
    return changed if inner is program else program.replace(jaxpr=changed)


def new_var_like(var: Var) -> Var:
    """A new variable with the aval of another one."""
    return type(var)(var.aval)


def new_var_of(var: Var, shape: Sequence[int]) -> Var:
    """A new variable with the aval of another one, but for its shape."""
    return type(var)(var.aval.update(shape=tuple(shape)))


def with_variables(program: Program, new: Mapping[Var, Var], eqns: Sequence[Equation]) -> Program:
    """The program made of these equations, which have the new variables already, and with these among its arguments and results."""
    inner = body(program)
    invars = [new.get(v, v) for v in inner.invars]
    outvars = [new.get(v, v) if is_var(v) else v for v in inner.outvars]
    inner = inner.replace(invars=invars, eqns=list(eqns), outvars=outvars)
    return inner if body(program) is program else program.replace(jaxpr=inner)


def inline_equation(equation: Equation, call: Equation, rename: Mapping[Var, Atom], outvars: Sequence[Var]) -> Equation:
    """An equation from inside the program of `call`, rewritten to be placed beside `call` instead.

    Its operands are renamed, its results are `outvars`, and the call's signals are put before its own.
    """
    info = equation.source_info if source_of(equation) else call.source_info
    invars = [rename.get(a, a) if is_var(a) else a for a in equation.invars]
    stack = call.source_info.name_stack + equation.source_info.name_stack
    return equation.replace(invars=invars, outvars=list(outvars), source_info=info.replace(name_stack=stack))


def inlined(program: Program, call: Equation, operands: Sequence[Atom], results: Sequence[Var]) -> list[Equation]:
    """The equations of a program, to be placed beside `call`: they read these operands and make these results."""
    inner = body(program)
    rename: dict[Var, Atom] = dict(zip(inner.invars, operands, strict=True))
    made = {var: result for var, result in zip(inner.outvars, results, strict=True) if is_var(var)}
    eqns: list[Equation] = []
    for equation in inner.eqns:
        outvars = [var if is_dropped(var) else made.get(var, new_var_like(var)) for var in equation.outvars]
        eqns.append(inline_equation(equation, call, rename, outvars))
        rename.update(zip(equation.outvars, outvars, strict=True))
    return eqns


# Programs inside equations


def param_items(equation: Equation) -> Iterator[object]:
    """Every param of an equation, and in place of a list or tuple its elements."""
    for value in equation.params.values():
        # One level is enough: cond, for example, has its branches in a tuple.
        yield from value if isinstance(value, tuple | list) else (value,)


def subprograms(equation: Equation) -> Iterator[Program]:
    """Every program in an equation's params."""
    return (item for item in param_items(equation) if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr))


def map_subprograms(equation: Equation, change: Callable[[Program], Program]) -> dict[str, Any] | None:
    """The params of an equation with `change` applied to every program in them; None if it returned each program unchanged."""
    params = map_params(equation, lambda item: change(item) if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr) else item)
    if all(params[key] is value for key, value in equation.params.items()):
        return None
    _map_derivative_rules(params, change)
    return params


def map_params(equation: Equation, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The params of an equation with `change` applied to each of them, and to each element of one that is a list or tuple."""
    return {key: _mapped(value, change) for key, value in equation.params.items()}


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(value, tuple | list):
        return change(value)
    new = [_mapped(item, change) for item in value]
    # The same object if nothing changed, which callers rely on; some params are tuples with a constructor of their own.
    return type(value)(new) if any(a is not b for a, b in zip(new, value, strict=True)) else value


def _map_derivative_rules(params: dict[str, Any], change: Callable[[Program], Program]) -> None:
    # custom_jvp and custom_vjp don't store their derivative as a program: they store a function that returns
    # (jaxpr, consts, ...) when the equation is differentiated. The change has to wait until then.
    for key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if key in params:
            params[key] = lu.wrap_init(_changed_rule(params[key], change), debug_info=params[key].debug_info)


def _changed_rule(rule: Any, change: Callable[[Program], Program]) -> Callable[..., Any]:
    def changed(*zeros: Any) -> Any:
        program, *rest = rule.call_wrapped(*zeros)
        return (change(program), *rest)

    return changed


def outer_operands(equation: Equation, program: Program) -> list[Atom | None]:
    """The operand of an equation that each argument of a program inside it receives.

    A program takes all operands (scan, jit, checkpoint, shard_map, custom derivatives) or the last of them (cond, whose
    first operand is the branch index); the params of a while loop say which operands are whose. None where the ranks show
    that the guess is wrong: an argument has the rank of its operand, or one less if a scan goes over it.
    """
    invars = body(program).invars
    outer = list(equation.invars)
    if "cond_nconsts" in equation.params:
        # The operands of a while loop are the condition's constants, the body's constants, then the carry. Each of its two programs
        # takes its own constants and the carry.
        num_condition, num_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        is_condition = program is equation.params["cond_jaxpr"]
        outer = outer[:num_condition] + outer[num_condition + num_body :] if is_condition else outer[num_condition:]
    outer = outer[-len(invars) :] if invars else []
    if len(outer) < len(invars):
        return [None] * len(invars)
    return [o if _rank(o) - _rank(i) in (0, 1) else None for o, i in zip(outer, invars, strict=True)]


def outer_results(equation: Equation, program: Program) -> list[Var | None]:
    """The result of an equation that each output of a program inside it becomes; None where they don't correspond."""
    outvars = body(program).outvars
    # The condition of a while loop that carries one value has as many outputs as the loop has results.
    if len(outvars) != len(equation.outvars) or program is equation.params.get("cond_jaxpr"):
        return [None] * len(outvars)
    return list(equation.outvars)


def scan_sizes(equation: Equation) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a scan; it goes over the rest."""
    # Ranks decide: jax 0.10 has the params num_consts and num_carry, later versions keep trees instead.
    inner = body(equation.params["jaxpr"])
    num_scanned = sum(_rank(o) > _rank(i) for o, i in zip(equation.invars, inner.invars, strict=True))
    num_carry = sum(_rank(o) == _rank(i) for o, i in zip(equation.outvars, inner.outvars, strict=True))
    return len(inner.invars) - num_scanned - num_carry, num_carry


# Kinds of equations


def is_call(equation: Equation) -> bool:
    """Whether an equation is a jax.jit inside the program, which means the same as its content."""
    return {"jaxpr", "donated_invars", "inline"} <= equation.params.keys()


def is_scan(equation: Equation) -> bool:
    """Whether an equation is a loop of known length, which can be differentiated backward."""
    return {"jaxpr", "length", "reverse"} <= equation.params.keys()


def is_remat(equation: Equation) -> bool:
    """Whether an equation is a jax.checkpoint region."""
    return {"jaxpr", "policy", "prevent_cse"} <= equation.params.keys()


def has_custom_derivative(equation: Equation) -> bool:
    """Whether an equation is a call of a jax.custom_jvp or jax.custom_vjp function."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def tensor_name(equation: Equation) -> str | None:
    """The name that `signal.tensor` (or checkpoint_name) gave to the result; None for any other equation."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def is_name(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether JAX is asking a checkpoint policy about a value with a name."""
    return primitive.name == "name" and "name" in params


# Where an equation comes from


def source_of(equation: Equation) -> str:
    """The user's file:line that an equation comes from; empty for what JAX traced on its own behalf."""
    text = source_info_util.summarize(equation.source_info)
    return "" if text == source_info_util.summarize(source_info_util.new_source_info()) else text


def exclude_lines(path: Path) -> None:
    """Lines of this file or folder are not where a user wrote an operation, though they are on the way to it."""
    source_info_util.register_exclusion(str(path))


def line_of(equation: Equation) -> str:
    """The file:line of the innermost user code that an equation comes from, preferably outside of installed packages."""
    frames = source_info_util.user_frames(equation.source_info.traceback)
    lines = [f"{frame.file_name}:{frame.start_line}" for frame in frames]
    line = next((line for line in lines if "site-packages" not in line), lines[0] if lines else "")
    return line.removeprefix(f"{Path.cwd()}/")


def place_of(equation: Equation, around: Place) -> Place:
    """The place of an equation whose program is at `around`."""
    signals, num_vmaps, of_microbatch = list(around.signals), around.num_vmaps, around.of_microbatch
    # Scopes and transforms share this stack, and a user may name a scope `vmap`. So the type of the element decides, too.
    for element in _listed_once(equation.source_info.name_stack.stack):
        if element.name.startswith(PREFIX):
            signals.append(element.name.removeprefix(PREFIX))
        # jvp and transpose are transforms too; only vmap adds a dim.
        elif type(element).__name__ == "Transform" and element.name == "vmap":
            num_vmaps += 1
        of_microbatch |= element.name == MICROBATCH
    return Place(tuple(signals), num_vmaps, of_microbatch)


def _listed_once(stack: Sequence[Any]) -> Sequence[Any]:
    """A name stack without a second list of scopes: around a recomputed region JAX writes transpose(jvp(a))/b/jvp(a)/b."""
    start = next((i for i, element in enumerate(stack) if element.name == "transpose"), len(stack)) + 1
    rest = stack[start:]
    for half in range(1, len(rest) // 2 + 1):
        if rest[0].name == "jvp" and rest[:half] == rest[half : 2 * half]:
            return [*stack[: start + half], *rest[2 * half :]]
    return stack


# Values


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a value; () for one that is not an array."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of an array, which may be the dtype of random keys."""
    return getattr(atom.aval, "dtype", None)


def struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom))


def _rank(atom: Atom) -> int:
    return len(shape_of(atom))


def is_var(atom: Atom) -> TypeIs[Var]:
    """Whether an operand is a variable rather than a literal."""
    return not isinstance(atom, jex.Literal)


def is_dropped(var: Var) -> bool:
    """Whether an equation's result is never used."""
    return isinstance(var, jex.DropVar)


def is_real(atom: Atom) -> bool:
    """Whether a value has floating-point numbers, and so a derivative."""
    return jax.numpy.issubdtype(dtype_of(atom), jax.numpy.floating)


def is_inexact(atom: Atom) -> bool:
    """Whether a value has floating-point or complex numbers."""
    return jax.numpy.issubdtype(dtype_of(atom), jax.numpy.inexact)


def is_integer(atom: Atom) -> bool:
    """Whether a value has integers."""
    return jax.numpy.issubdtype(dtype_of(atom), jax.numpy.integer)


def key_impl(aval: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The generator of a typed random key, as jax.random.wrap_key_data takes it."""
    return getattr(aval.dtype, "_impl").name  # noqa: B009


# Meshes around a trace or an equation


def vmapped_axes() -> frozenset[str]:
    """The mesh axes that vmaps around the current trace claim (spmd_axis_name); constraints inside may not name them."""
    return frozenset(get_axis_env().spmd_axis_names)


def mesh_around() -> AbstractMesh | None:
    """The mesh of the shard_map that the current trace is in; None outside of any."""
    mesh = jax.sharding.get_abstract_mesh()
    # jax.set_mesh sets an abstract mesh too, but one without manual axes: a trace under it is not inside a shard_map.
    return mesh if mesh.manual_axes else None


def manual_mesh(equation: Equation) -> AbstractMesh | None:
    """The mesh of the shard_map that an equation was traced in; None outside of any."""
    mesh = equation.ctx.cur_abstract_mesh
    return mesh if mesh.manual_axes else None


def context_on(equation: Equation, mesh: Mesh) -> JaxprEqnContext:
    """An equation's context with the kind of device of another mesh: inside a shard_map the context names the mesh too."""
    around = equation.ctx.cur_abstract_mesh
    # Outside of a shard_map and of jax.set_mesh an equation has the empty mesh, which names no devices.
    if not around.axis_names:
        return equation.ctx
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(around.update(abstract_device=mesh.abstract_mesh.abstract_device)):
        return JaxprEqnContext()
