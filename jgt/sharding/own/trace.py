# pyright: basic
"""Traces a function without the layout that it brings along, and runs it where axes are Explicit.

A function for Explicit axes is traced as if each of them had size 1. Then no type names an axis, and arguments of any layout fit. What
names the mesh itself, as a shard_map does, is traced on the mesh as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from jgt.program.equations import Around
from jgt.program.jaxpr import Equation, Program
from jgt.program.places import is_manual, one_device, under_mesh
from jgt.program.tracing import evaluate, trace
from jgt.sharding.own.layout import OwnLayout, equations, requests_of


def trace_own(
    fn: Callable[..., Any], own: AbstractMesh | None, arrays: Sequence[Any], typed: Sequence[Any], mesh: AbstractMesh | None = None
) -> tuple[Program, Any, tuple[OwnLayout, ...]]:
    """Traces a function without its own layout. Returns its program, the tree of its outputs, and what was erased.

    own: the mesh that it is written for, if one is known. arrays: the arguments without shardings. typed: with those that they have on it.
    mesh: what it is written for if no other mesh is known and it names axes.
    """
    if own is None or not own.explicit_axes:
        try:
            program, tree = trace_as_it_is(fn, own, arrays)
        # JAX's error for a PartitionSpec where no mesh is set.
        except RuntimeError as error:
            if own is not None or mesh is None:
                raise
            own = mesh
            try:
                program, tree = trace_as_it_is(fn, own, arrays)
            # It is written for other axes. The first error says what is missing.
            except ValueError:
                raise error from None
        if not any(_asks(e) or (own is not None and "bwd" in e.params) for e in equations(program)):
            return program, tree, ()
        around: Around = contextlib.nullcontext if own is None else functools.partial(under_mesh, own)
        erased, layouts = _erase(program, around)
        return erased, tree, layouts
    around = functools.partial(one_device, own)
    try:
        # On one device no type names an axis, so arguments of any layout fit.
        with around():
            program, tree = trace(fn, *arrays)
        is_whole = not any(map(is_manual, equations(program)))
    # What is wrong with the function itself is raised by the next trace.
    except Exception:
        is_whole, program, tree = False, None, None
    if program is None or not is_whole:
        # What names the mesh itself, as a shard_map does, needs it as it is.
        around = functools.partial(under_mesh, own)
        with around():
            program, tree = trace(fn, *typed)
    erased, layouts = _erase(program, around)
    return erased, tree, layouts


def _erase(program: Program, around: Around) -> tuple[Program, tuple[OwnLayout, ...]]:
    # Loaded with the first program that has a layout.
    return importlib.import_module("jgt.sharding.own.erase").erase(program, around)


def trace_as_it_is(fn: Callable[..., Any], own: AbstractMesh | None, typed: Sequence[Any]) -> tuple[Program, Any]:
    """Traces a function on the mesh that it is written for, with the types of its arguments there."""
    # What is set around the call already is its concrete form.
    is_set = own is not None and jax.sharding.get_abstract_mesh().shape_tuple == own.shape_tuple
    with contextlib.nullcontext() if own is None or is_set else under_mesh(own):
        return trace(fn, *typed)


def _asks(equation: Equation) -> bool:
    """Whether an equation asks for a layout, or is on a mesh with Explicit axes."""
    return bool(requests_of(equation)) or bool(equation.ctx.cur_abstract_mesh.explicit_axes)


def explicit_mesh_of(x: Any) -> AbstractMesh | None:
    """The mesh that the type of an array names, if it has Explicit axes."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None) if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    return mesh if mesh is not None and mesh.explicit_axes else None


def explicit_mesh_around(arrays: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with Explicit axes that is around a call, or that one of its arguments is on."""
    around = jax.sharding.get_abstract_mesh()
    return around if around.explicit_axes else next(filter(None, map(explicit_mesh_of, arrays)), None)


def run_on_auto_axes(
    run: Callable[[Sequence[Any]], list[Any]], arrays: Sequence[Any], mesh: AbstractMesh, results: Sequence[PartitionSpec]
) -> list[Any]:
    """Runs a program whose axes are Auto where they are Explicit. results: the types of what it returns."""
    with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().axis_names else under_mesh(mesh):
        # In a jit, because a single operation outside of it would be on the mesh that is set.
        run_on_auto: Any = jax.sharding.auto_axes(jax.jit(run), out_sharding=list(results))
        return run_on_auto(list(arrays))


def erased(fn: Callable[..., Any], own: AbstractMesh | None) -> Callable[..., Any]:
    """The same function without its own layout."""

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        program, out, _ = trace_own(lambda *arrays: fn(*jax.tree.unflatten(tree, arrays)), own, leaves, leaves)
        return jax.tree.unflatten(out, evaluate(program, leaves))

    return fn if own is None else run
