"""Checks of what a caller passes: a wrong type is answered with what to pass instead.

Without them, `jgt.shard(loss, rules, {"data": 2})` would fail later, with a traceback about some attribute that a dict does not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.program.places import with_auto_axes
from jgt.rules import Rules, load_rules, make_rules
from jgt.sharding.own.trace import explicit_mesh_around
from jgt.sharding.staged import Staging

RulesLike = Rules | str | os.PathLike[str] | Mapping[str, Any]
"""Rules, the path of a rules file, or the mapping that such a file contains."""


def as_rules(rules: object) -> Rules:
    """The rules that a caller means. Raises InputError for a wrong file or mapping, and TypeError for anything else."""
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, str | os.PathLike):
        return load_rules(cast("str", os.fspath(rules)))
    if isinstance(rules, Mapping):
        return make_rules(cast("Mapping[str, Any]", rules))
    swapped = " Rules and mesh are swapped: the order is (fn, rules, mesh)" if isinstance(rules, Mesh | AbstractMesh) else ""
    raise TypeError(f"rules must be jgt.Rules, the path of a rules file, or a mapping, not {_kind(rules)}.{swapped}".rstrip("."))


def rules_on(rules: object, mesh: object) -> Rules:
    """The rules that a caller means, on this mesh: an axis of shipped rules that it lacks has size 1. Raises as `as_rules` does."""
    found = as_rules(rules)
    return found.on(mesh.axis_names) if isinstance(mesh, Mesh | AbstractMesh) else found


def check_mesh(mesh: object) -> Mesh | AbstractMesh:
    """The mesh, with Auto axes in place of Explicit ones. Raises TypeError if it is not a mesh, and ValueError if it has Manual axes."""
    if isinstance(mesh, Mapping):
        sizes = dict(cast("Mapping[str, Any]", mesh))
        raise TypeError(f"mesh must be a mesh, not dict; make it with jgt.make_mesh({sizes!r})")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a mesh, not {_kind(mesh)}; make it with jgt.make_mesh, for example jgt.make_mesh({{'data': -1}})")
    # On Explicit axes JAX takes a constraint for an assertion about a type, and not for a request.
    auto: Mesh | AbstractMesh = with_auto_axes(mesh)
    if not auto.are_all_axes_auto:
        raise ValueError(f"the mesh must have Auto or Explicit axes, not {mesh.axis_types}; make it with jgt.make_mesh({dict(mesh.shape)})")
    return auto


def own_mesh(mesh: object) -> AbstractMesh | None:
    """The mesh that a function is written for: the mesh itself if it has Explicit axes, or else what `jax.set_mesh` has set."""
    if isinstance(mesh, Mesh | AbstractMesh) and mesh.explicit_axes:
        return mesh.abstract_mesh
    around = jax.sharding.get_abstract_mesh()
    return around if around.axis_names and not around.manual_axes else None


def ambient_mesh() -> Mesh | AbstractMesh:
    """The mesh that `jax.set_mesh` has set. Raises ValueError if there is none."""
    around = jax.sharding.get_abstract_mesh()
    if not around.axis_names:
        raise ValueError(
            "no mesh is given, and none is around this call. Pass jgt.make_mesh(...), or call it inside `with jax.set_mesh(mesh)`"
        )
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a jit
        return around
    return mesh if mesh.shape_tuple == around.shape_tuple else around


def check_surroundings(arrays: Sequence[Any], mesh: Mesh | AbstractMesh) -> AbstractMesh | None:
    """The mesh with Explicit axes that is around a call, or that its arguments are on. Raises ValueError if it is another mesh than `mesh`.

    Raises it, too, where GSPMD would choose the layouts: jgt cannot ask GSPMD for them before XLA compiles (see jgt.sharding.partitioner).
    """
    if not jax.config.values["jax_use_shardy_partitioner"]:
        raise ValueError(
            "jax_use_shardy_partitioner is off, so jgt cannot see which layouts XLA chooses, and XLA computes some of them wrongly "
            "(docs/partitioner.md). Remove that setting"
        )
    explicit = explicit_mesh_around(arrays)
    if explicit is not None and tuple(explicit.shape.items()) != tuple(mesh.shape.items()):
        is_around = explicit == jax.sharding.get_abstract_mesh()
        where = "the mesh around this call (jax.set_mesh)" if is_around else "the mesh of an argument"
        remedy = (
            "Call it outside of that context" if is_around else "Move the argument first: jax.device_put, to a sharding of the placement"
        )
        sizes = (", ".join(f"{axis}={size}" for axis, size in one.shape.items()) for one in (explicit, mesh))
        raise ValueError(
            "{where} has Explicit axes {}, and the rules are for a mesh of {}. {remedy}".format(*sizes, where=where, remedy=remedy)
        )
    return explicit


def check_pipeline(pipeline: object) -> Staging | None:
    """The pipeline. Raises TypeError if it is not a pipeline."""
    if pipeline is None or callable(getattr(pipeline, "stage", None)):
        return cast("Staging | None", pipeline)
    example = f"jgt.Pipeline(**{pipeline!r})" if isinstance(pipeline, Mapping) else 'jgt.Pipeline(signal="layers", microbatches=4)'
    raise TypeError(f"pipeline must be a jgt.Pipeline, not {_kind(cast(object, pipeline))}; write {example}")


def check_function(fn: object) -> None:
    """Raises TypeError for anything but a function of parameters: for a module itself, too."""
    advice = "Pass a function whose first argument contains the parameters"
    if _is_module(fn, "flax.linen"):
        raise TypeError(f"a linen module ({_kind(fn)}) has no parameters in itself. {advice}, such as model.apply")
    if _is_module(fn, "flax.nnx"):
        raise TypeError(f"an nnx module ({_kind(fn)}) contains its parameters. {advice}, such as lambda model, x: model(x)")
    if not callable(fn):
        raise TypeError(f"fn must be a function, not {_kind(fn)}. {advice}")


def check_optimizer(optimizer: object) -> None:
    """Raises TypeError for anything but None or an optax transformation."""
    if optimizer is not None and not callable(getattr(optimizer, "init", None)):
        raise TypeError(f"optimizer must be an optax transformation, such as optax.adam(1e-3), not {_kind(optimizer)}")


def _is_module(x: object, library: str) -> bool:
    # A module of Flax exists only if the caller has imported the library; jgt does not import it.
    kind = getattr(sys.modules.get(library), "Module", None)
    return kind is not None and isinstance(x, kind)


def _kind(x: object) -> str:
    return f"{x!r}" if isinstance(x, str | int | float) else type(x).__name__
