# pyright: basic
"""Everything that jgt knows about the internals of JAX's traced programs.

JAX traces a function to a jaxpr: a list of equations, some of which carry programs of their own in their params (scan,
while, cond, jit, checkpoint, shard_map, custom derivatives). jgt has to find and replace those programs without breaking
the equation around them, and JAX offers no public way to do so. This file and places.py may break with a new version
of JAX; tests/program/test_jaxpr.py checks each fact that they rely on.

No primitive is taken apart. A program is found in an equation's params by its type and is replaced in place by one with the same
signature, so that no kind of nesting needs its own code. Where a kind must be recognised (is it a scan?), the names of its params decide,
because they change less often than the primitive's name. jax 0.10 has two classes, Jaxpr and ClosedJaxpr, where jax 0.12 has one; `body`
and `with_body` hide the difference. The params of a hijax primitive are inside an object, which `params_of` and `with_params` hide.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.extend.core as jex
import jax.extend.linear_util as lu
from jax._src import source_info_util
from jax._src.ad_checkpoint import CheckpointName, name_p
from jax._src.interpreters import partial_eval, remat
from jax.core import Tracer
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Program = jex.Jaxpr | jex.ClosedJaxpr
"""A traced program; jax 0.12 has one class for both."""

Equation = jex.JaxprEqn
Var = jex.Var
Atom = jex.Var | jex.Literal
"""An operand of an equation, or an output of a program."""

_SIGNAL = f"{Path(__file__).parents[1] / 'signal.py'}:"
"""Where `signal.tensor` names values for its caller."""
_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max "
    "min mul mulhi name ne neg nextafter not one_minus_square or pcast polygamma polynomial population_count pow pvary "
    "random_clone random_fold_in random_gamma real reduce_precision regularized_incomplete_beta rem reshard round rsqrt "
    "select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh threefry2x32 xor zeta"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""The primitives that JAX batches as elementwise. Operands have the rank of the result, or 0; their sizes are those of the result, or 1."""


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Traces `fn` at arrays or ShapeDtypeStructs. Returns its program and the tree of its outputs."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return _with_plain_names(program), jax.tree.structure(shapes)


def _with_plain_names(program: Program) -> Program:
    # With jax_remat3, a name is an object. Whatever reads programs knows the primitive of the same meaning.
    if not body(program).is_high:
        return program
    eqns = [map_subprograms(equation, _with_plain_names) for equation in body(program).eqns]
    plain = [e.replace(primitive=name_p, params=params_of(e)) if _is_hijax_name(e) else e for e in eqns]
    return with_body(program, eqns=plain, outvars=body(program).outvars)


def _named(around: Any, x: jax.Array, *, name: str) -> Any:
    return CheckpointName(name, jax.typeof(x)).remat(around, x)


# JAX has this rule for the object alone.
remat.rules[name_p] = _named


def _is_hijax_name(equation: Equation) -> bool:
    return isinstance(equation.params.get("_prim"), CheckpointName)


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
    return _with(program, eqns=list(eqns), outvars=list(outvars))


def _with(program: Program, **parts: Any) -> Program:
    inner = _marked(body(program).replace(**parts))
    return inner if body(program) is program else program.replace(jaxpr=inner)


def _marked(inner: jex.Jaxpr) -> jex.Jaxpr:
    # JAX expands hijax primitives only in programs that say that they have some.
    is_high = inner.is_high or any(e.primitive.is_high(*[a.aval for a in e.invars], **e.params) for e in inner.eqns)
    return inner if is_high == inner.is_high else inner.replace(is_high=is_high)


def constants(program: Program) -> dict[Var, ArrayLike]:
    """The arrays that a program closes over, by variable."""
    return dict(zip(body(program).constvars, getattr(program, "consts", ()), strict=True))


def program_of(like: Program, invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]) -> Program:
    """A new program made of equations of `like`. It closes over nothing: `invars` must include the constants it reads."""
    inner = body(like)
    # The debug info of `like` names arguments and results that the new program does not have.
    info = inner.debug_info.with_unknown_names()
    inner = _marked(inner.replace(constvars=[], invars=list(invars), eqns=list(eqns), outvars=list(outvars), debug_info=info))
    return inner if body(like) is like else jex.ClosedJaxpr(inner, [])


def with_results(program: Program, which: Sequence[int]) -> Program:
    """The same program with only these of its outputs, by number."""
    inner = body(program)
    return _with(program, outvars=[inner.outvars[n] for n in which], debug_info=inner.debug_info.with_unknown_names())


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
    return _with(program, invars=invars, eqns=list(eqns), outvars=outvars)


def retyped(program: Program, **parts: Any) -> Program:
    """A program made of these constvars, invars, eqns and outvars, whose constants are on no mesh."""
    inner = _marked(body(program).replace(**parts))
    if body(program) is program:
        return inner
    return program.replace(jaxpr=inner, consts=[plain_value(x) for x in constants(program).values()])


def plain_value(x: Any) -> Any:
    """A value that a program contains, without a type that names a mesh."""
    if isinstance(x, jax.Array):
        is_array = not isinstance(x, Tracer) and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
        return jax.device_get(x) if is_array and jax.typeof(x).sharding.mesh.axis_names else x
    # JAX's kind of NumPy array remembers its type. A view of it forgets that, and asks for it again where it is read.
    return x.view() if hasattr(x, "view") else x


def params_of(equation: Equation) -> dict[str, Any]:
    """The params of an equation. A hijax primitive is an object with params of its own, and the only param of its equation."""
    return getattr(equation.params.get("_prim"), "params", equation.params)


def with_params(equation: Equation, **params: Any) -> Equation:
    """The same equation with these of its `params_of` changed."""
    params = {**params_of(equation), **params}
    if (primitive := equation.params.get("_prim")) is None:
        return equation.replace(params=params)
    new = copy.copy(primitive)
    ins, outs = ([atom.aval for atom in atoms] for atoms in (equation.invars, equation.outvars))
    types = {"in_avals_flat": ins, "out_avals_flat": outs, "in_avals": new.in_tree.unflatten(ins), "out_aval": new.out_tree.unflatten(outs)}
    new.__dict__.update(params, params=params, **types)
    return equation.replace(params={**equation.params, "_prim": new})


def param_items(equation: Equation) -> Iterator[object]:
    """Every param of an equation, and in place of a list or tuple its elements."""
    for value in params_of(equation).values():
        # One level is enough: cond, for example, has its branches in a tuple.
        yield from value if isinstance(value, tuple | list) else (value,)


def subprograms(equation: Equation) -> Iterator[Program]:
    """Every program in an equation's params."""
    return (item for item in param_items(equation) if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr))


Around = Callable[[], contextlib.AbstractContextManager[object]]
"""Makes a context for the trace of a rule that is traced when it is needed."""


def map_subprograms(equation: Equation, change: Callable[[Program], Program], around: Around = contextlib.nullcontext) -> Equation:
    """An equation with `change` applied to every program in it; the same object if it returned each program unchanged."""
    old = params_of(equation)
    params = {key: _mapped(value, lambda x: change(x) if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr) else x) for key, value in old.items()}
    if all(params[key] is value for key, value in old.items()):
        return equation
    _map_derivative_rules(params, change, around)
    return with_params(equation, **params)


def map_params(equation: Equation, change: Callable[[Any], Any]) -> Equation:
    """An equation with `change` applied to each of its params, and to each element of one that is a list or tuple."""
    return with_params(equation, **{key: _mapped(value, change) for key, value in params_of(equation).items()})


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(value, tuple | list):
        return change(value)
    new = [_mapped(item, change) for item in value]
    # The same object if nothing changed, which callers rely on; some params are tuples with a constructor of their own.
    return type(value)(new) if any(a is not b for a, b in zip(new, value, strict=True)) else value


def _map_derivative_rules(params: dict[str, Any], change: Callable[[Program], Program], around: Around) -> None:
    # custom_jvp and custom_vjp don't store their derivative as a program: they store a function that returns
    # (jaxpr, consts, ...) when the equation is differentiated. The change has to wait until then.
    for key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if key in params:
            params[key] = lu.wrap_init(_changed_rule(params[key], change, around), debug_info=params[key].debug_info)


def _changed_rule(rule: Any, change: Callable[[Program], Program], around: Around) -> Callable[..., Any]:
    def changed(*zeros: Any) -> Any:
        with around():
            program, *rest = rule.call_wrapped(*zeros)
        return (change(program), *rest)

    return changed


def outer_operands(equation: Equation, program: Program) -> list[Atom | None]:
    """The operand of an equation that each argument of a program inside it receives.

    A program takes all operands (scan, jit, checkpoint, shard_map, custom derivatives) or the last of them (cond, whose
    first operand is the branch index); the params of a while loop and of a linear solve say which operands are whose. None where the ranks
    show that the guess is wrong: an argument has the rank of its operand, or one less if a scan goes over it.
    """
    invars = body(program).invars
    outer = list(equation.invars)
    if "cond_nconsts" in equation.params:
        # The operands of a while loop are the condition's constants, the body's constants, then the carry. Each of its two programs
        # takes its own constants and the carry.
        num_condition, num_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        is_condition = program is equation.params["cond_jaxpr"]
        outer = outer[:num_condition] + outer[num_condition + num_body :] if is_condition else outer[num_condition:]
    if "const_lengths" in equation.params:
        # The operands of a linear solve are the constants of each of its programs, then the right-hand sides, which all of them take.
        lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
        index = next(n for n, one in enumerate(programs) if one is program)
        outer = outer[sum(lengths[:index]) :][: lengths[index]] + outer[sum(lengths) :]
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


def is_call(equation: Equation) -> bool:
    """Whether an equation is a jax.jit inside the program, which means the same as its content."""
    return {"jaxpr", "donated_invars", "inline"} <= equation.params.keys()


def is_scan(equation: Equation) -> bool:
    """Whether an equation is a loop of known length, which can be differentiated backward."""
    return {"jaxpr", "length", "reverse"} <= equation.params.keys()


def is_remat(equation: Equation) -> bool:
    """Whether an equation is a jax.checkpoint region."""
    return {"jaxpr", "policy"} <= params_of(equation).keys()


def policy_of(equation: Equation) -> Callable[..., Any] | None:
    """The policy of a jax.checkpoint region; None if it saves nothing, and for any other equation."""
    return params_of(equation)["policy"] if is_remat(equation) else None


def is_recomputed(policy: Callable[..., Any] | None, equation: Equation) -> bool:
    """Whether a policy of jax.checkpoint drops the results of an equation."""
    if policy is None:
        return True
    answer = policy(equation.primitive, *[a.aval for a in equation.invars], **equation.params)
    return partial_eval.ensure_enum(answer) is partial_eval.Recompute


def has_custom_derivative(equation: Equation) -> bool:
    """Whether an equation is a call of a jax.custom_jvp or jax.custom_vjp function."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def tensor_name(equation: Equation) -> str | None:
    """The name that `signal.tensor` (or checkpoint_name) gave to the result; None for any other equation."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def placed_like(equation: Equation, like: Equation, scope: str) -> Equation:
    """An equation with the source line and the scopes of another one, in one more scope."""
    info = like.source_info
    return equation.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


def source_of(equation: Equation) -> str:
    """The user's file:line that an equation comes from; empty for what JAX traced on its own behalf."""
    text = source_info_util.summarize(equation.source_info)
    return "" if text == source_info_util.summarize(source_info_util.new_source_info()) else text


def exclude_lines(path: Path) -> None:
    """Lines of this file or folder are not where a user wrote an operation, though they are on the way to it."""
    source_info_util.register_exclusion(str(path))


def line_of(equation: Equation) -> str:
    """The file:line of the innermost user code that an equation comes from, preferably outside of installed packages."""
    return line_in(equation.source_info.traceback)


def line_in(traceback: Any) -> str:
    """The same for a traceback."""
    frames = source_info_util.user_frames(traceback)
    lines = [f"{frame.file_name}:{frame.start_line}" for frame in frames]
    line = next((line for line in lines if "site-packages" not in line and not line.startswith(_SIGNAL)), lines[0] if lines else "")
    return line.removeprefix(f"{Path.cwd()}/")


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
