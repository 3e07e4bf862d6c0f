# pyright: basic
"""Where an equation or a trace is: in which signals of the model, under which vmaps, and in the shard_map of which mesh."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import config, source_info_util
from jax._src.core import JaxprEqnContext, get_axis_env
from jax.sharding import AbstractMesh, AxisType, Mesh

from jgt.program.jaxpr import Equation
from jgt.program.scopes import MICROBATCH, OWN, PREFIX, RULE

_T = TypeVar("_T")

_VMAP = ("vmap", "Transform")
_SIGNAL = re.compile(r"[A-Za-z0-9_.-]+")
_TENSOR = f"{Path(__file__).parents[1] / 'signal.py'}:"
"""Where `signal.tensor` names values for its caller."""
NO_MESH = AbstractMesh((), ())
"""The mesh that is around what no mesh is around."""


@dataclass(frozen=True)
class Place:
    """Where an equation is in the model: the signals around it, outermost first, and how many vmaps it was traced under.

    A vmap adds a leading dim to every value below it that the model's author does not see, so rules must not count it.
    of_microbatch: the model says that values there are meant of one microbatch. is_backward: whether JAX has transposed a program around.
    """

    signals: tuple[str, ...] = ()
    num_vmaps: int = 0
    of_microbatch: bool = False
    is_backward: bool = field(default=False, compare=False)

    @property
    def path(self) -> str:
        """The signals as a path, such as layers/attn."""
        return "/".join(self.signals)

    def inside(self, signals: tuple[str, ...]) -> bool:
        """Whether this place is in the region that these signals name."""
        return self.signals[: len(signals)] == signals


def place_of(equation: Equation, around: Place) -> Place:
    """The place of an equation whose program is at `around`."""
    signals, num_vmaps, of_microbatch = list(around.signals), around.num_vmaps, around.of_microbatch
    stack = equation.source_info.name_stack.stack
    is_backward = around.is_backward or any(element.name in ("transpose", "rematted_computation") for element in stack)
    scopes = [(element.name, type(element).__name__) for element in stack]
    # Scopes and transforms share this stack, and a user may name a scope `vmap`. So the type of the element decides, too.
    for name, kind in _listed_once(scopes, signals) if is_backward else scopes:
        if name.startswith(PREFIX):
            signals.append(name.removeprefix(PREFIX))
        # jvp and transpose are transforms too; only vmap adds a dim.
        elif (name, kind) == _VMAP:
            num_vmaps += 1
        of_microbatch |= name == MICROBATCH
    return Place(tuple(signals), num_vmaps, of_microbatch, is_backward)


def _listed_once(stack: Sequence[tuple[str, str]], around: Sequence[str]) -> Sequence[tuple[str, str]]:
    """The signals and vmaps of a name stack of a backward pass, without a second list of them.

    Around a recomputed region JAX writes transpose(jvp(a))/b/jvp(a)/b, and in the body of a loop b/b.
    """
    half = len(stack) // 2
    stack = stack[:half] if stack[:half] == stack[half:] else stack
    scopes: list[tuple[str, str]] = []
    begins = set[int]()
    for element in stack:
        if element == ("jvp", "Transform"):
            begins.add(len(scopes))
        elif element == _VMAP or element[0].startswith((PREFIX, MICROBATCH)):
            scopes.append(element)
    return listed_once(scopes, begins, [(PREFIX + signal, "Scope") for signal in around])


def listed_once(scopes: Sequence[_T], begins: Collection[int], around: Sequence[_T] = ()) -> list[_T]:
    """The scopes of an operation of a backward pass without those that JAX lists a second time around a recomputed region.

    begins: the indices where JAX begins a list, with `jvp`, as in transpose(jvp(a))/b/jvp(a)/b; around: the scopes of the program.
    """
    once, end = list(around), 0
    for index, scope in enumerate(scopes):
        if index in begins:
            lengths = range(min(len(once), len(scopes) - index), 0, -1)
            end = index + next((n for n in lengths if once[-n:] == list(scopes[index : index + n])), 0)
        if index >= end:
            once.append(scope)
    return once[len(around) :]


def trace_context() -> Hashable:
    """Everything around the active trace that a traced program depends on: x64, default precision, meshes, vmapped axes.

    Equal for two traces that would give the same program; JAX keys its own caches with it.
    """
    return config.trace_context()


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


def mesh_context(equation: Equation) -> contextlib.AbstractContextManager[object]:
    """The mesh of the shard_map that an equation was traced in."""
    return contextlib.nullcontext() if manual_mesh(equation) is None else equation.ctx.manager


def context_on(equation: Equation, mesh: Mesh) -> JaxprEqnContext:
    """An equation's context with the kind of device of another mesh: inside a shard_map the context names the mesh too."""
    around = equation.ctx.cur_abstract_mesh
    # Outside of a shard_map and of jax.set_mesh an equation has the empty mesh, which names no devices.
    if not around.axis_names:
        return equation.ctx
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(around.update(abstract_device=mesh.abstract_mesh.abstract_device)):
        return JaxprEqnContext()


def under_mesh(mesh: AbstractMesh) -> contextlib.AbstractContextManager[object]:
    """A context in which this mesh is around a trace, in place of any other."""
    return jax.sharding.use_abstract_mesh(mesh)


def no_mesh_set() -> contextlib.AbstractContextManager[object]:
    """A context in which no mesh is set, neither devices nor axes."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def off_explicit_axes() -> contextlib.AbstractContextManager[object]:
    """A context that no mesh with Explicit axes is around."""
    return under_mesh(NO_MESH) if jax.sharding.get_abstract_mesh().explicit_axes else contextlib.nullcontext()


@contextlib.contextmanager
def one_device(mesh: AbstractMesh) -> Iterator[None]:
    """A context with the axes of a mesh, each of size 1, in which no type names an axis."""
    with under_mesh(mesh.update(axis_sizes=(1,) * len(mesh.axis_names))), config.remove_size_one_mesh_axis_from_type(True):
        yield


def off_mesh(equation: Equation) -> JaxprEqnContext:
    """An equation's context without a mesh; inside of a shard_map, with its mesh on Auto axes."""
    mesh = manual_mesh(equation)
    around = NO_MESH if mesh is None else with_auto_axes(mesh)
    with equation.ctx.manager, under_mesh(around), config.remove_size_one_mesh_axis_from_type(False):
        return JaxprEqnContext()


def with_auto_axes(mesh: Any) -> Any:
    """The same mesh, or an abstract one, with Auto axes in place of Explicit ones."""
    types = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return mesh if types == mesh.axis_types else Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh if types == mesh.axis_types else mesh.update(axis_types=types)


def is_manual(equation: Equation) -> bool:
    """Whether an equation is a shard_map."""
    return {"mesh", "in_specs", "out_specs"} <= equation.params.keys()


def in_rule(equation: Equation) -> bool:
    """Whether an equation is what a rule asks for."""
    return any(element.name == RULE for element in equation.source_info.name_stack.stack)


def scopes_as_signals(equation: Equation) -> Equation:
    """An equation whose named scopes are signals."""
    info = equation.source_info
    stack = tuple(
        element._replace(name=PREFIX + element.name)
        if type(element).__name__ == "Scope" and _SIGNAL.fullmatch(element.name) and not element.name.startswith(OWN)
        else element
        for element in info.name_stack.stack
    )
    return equation.replace(source_info=info.replace(name_stack=type(info.name_stack)(stack))) if stack else equation


def results_of(equation: Equation, operands: Sequence[Any]) -> list[jax.Array]:
    """The results of an equation for these operands, at the equation's place."""
    primitive = equation.primitive
    with in_place_of(equation):
        results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


@contextlib.contextmanager
def in_place_of(equation: Equation) -> Iterator[None]:
    """A context in which operations get an equation's line and, behind the signals around, its signals."""
    around, own = source_info_util.current(), equation.source_info
    # What JAX traced on its own behalf has the line of the call around it.
    traceback = own.traceback if source_of(equation) else around.traceback
    with source_info_util.user_context(traceback, name_stack=around.name_stack + own.name_stack), equation.ctx.manager:
        yield


def placed_like(equation: Equation, like: Equation, scope: str) -> Equation:
    """An equation with the source line and the scopes of another one, in one more scope."""
    return equation.replace(source_info=like.source_info.replace(name_stack=like.source_info.name_stack.extend(scope)))


def source_of(equation: Equation) -> str:
    """The user's file:line that an equation comes from; empty for what JAX traced on its own behalf."""
    text = source_info_util.summarize(equation.source_info)
    return "" if text == source_info_util.summarize(source_info_util.new_source_info()) else text


def exclude_lines(path: Path) -> None:
    """Lines of this file or folder are not where a user wrote an operation, though they are on the way to it."""
    source_info_util.register_exclusion(str(path))


def line_of(equation: Equation) -> str:
    """The file:line of the innermost user code that an equation comes from, preferably outside of installed packages."""
    return _line_in(equation.source_info.traceback)


def line_here() -> str:
    """The file:line of the user's code that operations which are traced now come from."""
    return _line_in(source_info_util.current().traceback)


def _line_in(traceback: Any) -> str:
    frames = source_info_util.user_frames(traceback)
    lines = [f"{frame.file_name}:{frame.start_line}" for frame in frames]
    line = next((line for line in lines if "site-packages" not in line and not line.startswith(_TENSOR)), lines[0] if lines else "")
    return line.removeprefix(f"{Path.cwd()}/")
