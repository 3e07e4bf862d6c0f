"""The parameters of a published model as a run has them, from the files of its folder, and from those of an adapter (`lora.hf`).

Everything that the two say about names and shapes is compared with the run's model before a tensor is read, also by `jgt check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..files.cache import local_folder
from ..models.config import ModelConfig
from ..step.state import Tree
from ..step.trained import merged
from ..weights.adapt.adapters import factors_of
from ..weights.adapters import CONFIG, Peft, read_peft
from ..weights.described import published
from ..weights.factors import Site, check_base, check_factors, load_factors
from ..weights.load import Files, open_files
from .setup import Setup


@dataclass(frozen=True, kw_only=True)
class PublishedFiles:
    """Files that fit the model of a run. peft: an adapter that it begins with. sites: the adapter's matrices, by the paths of A and B."""

    files: Files
    peft: Peft | None = None
    sites: Mapping[tuple[str, str], Site] = field(default_factory=dict[tuple[str, str], Site])

    @property
    def rank(self) -> int:
        """The rank of the adapter; 0 without one."""
        return 0 if self.peft is None else self.peft.rank

    def factors(self, setup: Setup) -> Tree:
        """The factors of the adapter, a tree of arrays as `setup.saved_params` lays them out."""
        adapters = setup.program.adapters
        assert adapters is not None and self.peft is not None
        return load_factors(self.peft, self.sites, adapters.config.scale, adapters.divided(setup.saved_params[1])[1])


def open_published(setup: Setup, folder: Path, adapter: Path | None = None) -> PublishedFiles:
    """The files of a published model, and of an adapter: `lora.hf`, or another one that fits the section.

    Raises InputError with every tensor that does not fit, and DiskError.
    """
    adapters, model = setup.program.adapters, setup.run.config.model
    assert isinstance(model, ModelConfig)
    files = open_files(published(folder), model, base_shapes(setup))
    path = adapter or (None if adapters is None else adapters.config.hf)
    if adapters is None or path is None:
        return PublishedFiles(files=files)
    peft = read_peft(local_folder(str(path), CONFIG))
    sites = {factors_of(path): Site.of(files.sources[path], path, matrix.shape) for path, matrix in adapters.matrices.items()}
    check_factors(peft, sites)
    check_base(peft, folder)
    return PublishedFiles(files=files, peft=peft, sites=sites)


def base_shapes(setup: Setup) -> Tree:
    """The shapes of the parameters in a checkpoint, without those of adapters."""
    shapes, adapters = setup.saved_params[0], setup.program.adapters
    return shapes if adapters is None else adapters.divided(shapes)[0]


def published_model(
    setup: Setup, folder: Path, first: Tree | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[Tree, Tree]:
    """The parameters of a published model, as the state has them, and those of its variables that it has. Raises as `open_published` does.

    first: parameters from which new adapters come, such as those of a fresh state. None: it is made. say: gets a line about tensors that
    are left out.
    """
    (shapes, shardings), adapters, found = setup.saved_params, setup.program.adapters, open_published(setup, folder)
    if found.files.left_out is not None:
        say(f"{folder}: {found.files.left_out}")
    one, places = setup.saved_of_one
    variables = found.files.variables(one.variables, places.variables)
    if adapters is None:
        return setup.stored_params(found.files.load(shapes, shardings)), variables
    params = found.files.load(base_shapes(setup), adapters.divided(shardings)[0])
    if found.peft is None:
        first = setup.model_params(setup.last_params(setup.init()) if first is None else first)
        return setup.stored_params(merged(first, params)), variables
    return setup.stored_params(merged(params, found.factors(setup))), variables
