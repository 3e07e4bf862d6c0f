"""Checks of what a caller passes: a wrong type is answered with what to pass instead.

Without them, `jgt.shard(loss, rules, {"data": 2})` would fail later, with a traceback about some attribute that a dict does not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.rules import Rules, load_rules, make_rules
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


def check_mesh(mesh: object) -> Mesh | AbstractMesh:
    """The mesh. Raises TypeError if it is not a mesh, and ValueError if its axes are not all Auto."""
    if isinstance(mesh, Mapping):
        sizes = dict(cast("Mapping[str, Any]", mesh))
        raise TypeError(f"mesh must be a mesh, not dict; make it with jgt.make_mesh({sizes!r})")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a mesh, not {_kind(mesh)}; make it with jgt.make_mesh, for example jgt.make_mesh({{'data': -1}})")
    # On Explicit axes JAX takes a constraint for an assertion about a type, and not for a request.
    if not mesh.are_all_axes_auto:
        raise ValueError(
            f"the mesh must have Auto axes, not {mesh.axis_types}; make it with jgt.make_mesh({dict(mesh.shape)}), "
            f"or add axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to jax.make_mesh"
        )
    return mesh


def check_surroundings(arrays: Iterable[Any]) -> None:
    """Raises ValueError where a mesh with Explicit axes is around a call, or where one of its arguments is on such a mesh.

    Raises it, too, where GSPMD would choose the layouts: jgt cannot ask GSPMD for them before XLA compiles (see jgt.sharding.partitioner).
    """
    if not jax.config.values["jax_use_shardy_partitioner"]:
        raise ValueError(
            "jax_use_shardy_partitioner is off, so jgt cannot see which layouts XLA chooses, and XLA computes some of them wrongly "
            "(docs/partitioner.md). Remove that setting"
        )
    around = jax.sharding.get_abstract_mesh()
    where = f"the axes {', '.join(around.explicit_axes)} of the mesh around this call (jax.set_mesh) are Explicit"
    if not around.explicit_axes:
        meshes = (getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None) for x in arrays)
        explicit = next((mesh for mesh in meshes if mesh is not None and mesh.explicit_axes), None)
        if explicit is None:
            return
        where = f"an argument is on a mesh whose axes {', '.join(explicit.explicit_axes)} are Explicit"
    raise ValueError(
        f"{where}, where JAX takes a constraint for an assertion and does not move the array. "
        "jgt needs Auto axes: use a mesh from jgt.make_mesh, or jax.make_mesh with axis_types=(jax.sharding.AxisType.Auto, ...)"
    )


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
