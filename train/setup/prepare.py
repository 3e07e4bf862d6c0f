"""Prepares a run in four steps: its layout, its program, the place of every array, and its state.

Training, `--dry-run`, `--replay`, `jgt check` and `jgt plan` have to speak of one program, or a check could pass where training fails. So
all of them call `prepare`, which makes the whole program from shapes. Nothing in it needs devices: on an abstract mesh, a laptop checks a
run for hardware that it does not have.

The invariant: whatever is wrong with rules, mesh and shapes is raised by `prepare`, before anything is compiled or allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..config import Run, batch_problems, replica_problems
from .layout import mesh_layout
from .place import place
from .program import element_of, program_of
from .remat import Remat
from .setup import Setup
from .state import new_state


def prepare(
    run: Run,
    *,
    num_devices: int | None = None,
    like: Any = None,
    devices: Sequence[Any] | None = None,
    element: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    remat: Remat | None = None,
) -> Setup:
    """Traces the run's loss and places everything. With `num_devices` no device is touched: the mesh is abstract.

    like: a description of one of these devices. devices: the mesh's, otherwise all that JAX finds. element: the arrays of one row of data
    of the user's own; without it the data is opened. remat: replaces `train.remat`.

    Raises InputError with every misfit of rules, mesh and shapes.
    """
    config, code, where = run.config, run.code, run.where
    layout = mesh_layout(run, num_devices=num_devices, like=like, devices=devices)
    element = element or element_of(config, code, where)
    program = program_of(config, layout, code, where, element=element, remat=remat or config.train.remat)
    sizes = layout.mesh.shape
    placed = place(program, config, layout, where, problems=(*batch_problems(run, sizes), *replica_problems(run, sizes)))
    state = new_state(program, placed, config, layout, code, where)
    return Setup(
        run=run,
        mesh=layout.mesh,
        model=program.model,
        attention=program.attention,
        grouped=program.grouped,
        remat=program.remat,
        loss_chunks=program.loss_chunks,
        element=element,
        objective=placed.objective,
        placement=placed.placement,
        storage=placed.storage,
        gradients=placed.gradients,
        offload=config.optimizer.offload == "host",
        make_optimizer=state.make_optimizer,
        features=state.features,
        phases=state.phases,
        make_state=state.make,
        shapes=state.shapes,
    )
