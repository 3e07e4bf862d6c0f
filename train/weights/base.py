"""Published weights that hold the frozen parameters of a run: a checkpoint names their folder and its identity, and leaves them out.

Frozen parameters are most of a model, and never change. Stored once more in each checkpoint, they would cost more than all that is
trained. But a checkpoint whose parameters were silently others would be worse than a large one, so it has the folder's identity
(`train.weights.contents`).

Frozen parameters that were made from random values, or came from another run's checkpoint, are in no folder, and are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jgt import path_text
from jgt.document import InputError, path_problem

from ..checkpoint.listing import ArrayEntry, Base
from ..checkpoint.manifest import FROZEN
from ..checkpoint.restore import restore_params
from ..checkpoint.saved import SavedStep, array_entries, check_arrays
from ..files.bucket import is_url
from ..files.cache import local_folder
from ..models.config import ModelConfig
from ..processes.processes import agreed
from ..step.trained import divided, merged
from .contents import SAMPLED, has_identity, identity
from .described import published
from .load import Files, open_files

ALLOWED = "base"
"""The name for `--allow-change`, to train on with other contents of the folder."""


def base_in(place: str, frozen: Any) -> Base | None:
    """The base of a run that froze the model in a folder, or at a URL. frozen: their shapes in a checkpoint; None without any.

    Raises InputError, on all processes, if it is not the same on all of them, and DiskError.
    """
    arrays = array_entries({FROZEN: frozen})
    if not arrays:
        return None
    path = place if is_url(place) else str(Path(place).absolute())
    what = "the folder that it reads"
    return agreed(lambda: Base(path=path, sha256=identity(local_folder(place)), arrays=arrays), lambda base: base.sha256[:SAMPLED], what)


def resumed_base(saved: SavedStep, model: Any, frozen: Any) -> Base | None:
    """The base of a run that resumes from a checkpoint: it may have been moved, or changed where that was allowed."""
    base = saved.manifest.base
    return None if base is None else base_in(_place_of(base, model), frozen)


def inherited_base(saved: SavedStep, frozen: Any) -> Base | None:
    """The base of a run that begins from the parameters of a checkpoint: the checkpoint's, if it has all that the run freezes."""
    arrays, base = array_entries({FROZEN: frozen}), saved.manifest.base
    return replace(base, arrays=arrays) if base is not None and arrays and {*arrays} <= {*base.arrays} else None


def open_base(base: Base, model: Any, shapes: Any, *, allow: Sequence[str] = ()) -> Files:
    """The files of a base, in the folder of `model.hf` or else where they were.

    model: the model section. shapes: of all parameters of the model, by path or nested. allow: as in `Resume` of a run. Raises
    InputError if the folder is missing or holds another model, and DiskError.
    """
    if not isinstance(model, ModelConfig):
        raise InputError([f"model.kind: {model.kind} has no published weights, but the checkpoint's frozen parameters are in {base.path}"])
    place = _place_of(base, model)
    folder = local_folder(place)
    if problem := path_problem(folder, "folder"):
        why = f"cannot be read: {problem}. It has the frozen parameters of the run, which its checkpoints leave out"
        remedy = "Name the folder where the model is now: model.hf=FOLDER (to train on, with --allow-change model.hf)"
        raise InputError([f"{place}: {why}. {remedy}"])
    files = open_files(published(folder), model, shapes)
    if ALLOWED not in allow and not has_identity(folder, base.sha256):
        why = "its tensors are not those that the run froze. Its checkpoints leave them out"
        remedy = f"Put the model back, or name its folder (model.hf=FOLDER). --allow-change {ALLOWED} trains on with what is there"
        raise InputError([f"{place}: {why}. {remedy}"])
    return files


def frozen_paths(base: Base | None) -> dict[str, ArrayEntry]:
    """The parameters that a base holds, by their paths in the model."""
    return {} if base is None else {entry.path.removeprefix(f"{FROZEN}/"): entry for entry in base.arrays}


def restored_params(saved: SavedStep, shapes: Any, shardings: Any, *, model: Any, whole: Any, cast: bool = False) -> Any:
    """Parameters of a checkpoint as `restore_params` restores them, also those that it leaves to its base.

    model, whole: as for `restored_frozen`.
    """
    held = frozen_paths(saved.manifest.base)
    if not held:
        return restore_params(saved, shapes, shardings, cast=cast)
    (frozen, others), (places, other_places) = (divided(tree, held.__contains__) for tree in (shapes, shardings))
    read = restored_frozen(saved, frozen, places, model=model, whole=whole, cast=cast)
    return merged(restore_params(saved, others, other_places, cast=cast), read) if others else read


def restored_frozen(
    saved: SavedStep, shapes: Any, shardings: Any, *, model: Any, whole: Any, cast: bool = False, allow: Sequence[str] = ()
) -> Any:
    """The frozen parameters that a checkpoint leaves to its base, straight into shards.

    model: the model section. whole: the shapes of all parameters of the model. allow: as in `open_base`. Raises InputError, on all
    processes, for a base that is missing, holds other weights, or does not fit.
    """
    base = saved.manifest.base
    assert base is not None
    check_arrays(saved.folder, base.arrays, array_entries({FROZEN: shapes}), convert=cast)
    files, held = agreed(lambda: open_base(base, model, whole, allow=allow)), frozen_paths(base)
    # In the type in which the run froze them: a conversion follows the rounding.
    stored = jax.tree.map_with_path(lambda path, x: jax.ShapeDtypeStruct(x.shape, held[path_text(path)].dtype), shapes)
    return jax.tree.map(lambda read, x: read.astype(x.dtype), files.load(stored, shardings), shapes)


def _place_of(base: Base, model: Any) -> str:
    # A relative path may be that of another working directory.
    places = [place for place in (getattr(model, "hf", None), base.path) if place is not None]
    return next((place for place in places if is_url(place) or Path(place).is_dir()), places[0])
