"""Whatever the schedule, the mesh and the options: the loss and every gradient are those of one device."""

import itertools

import pytest
from models import assert_exact, case, decoder_loss, make_params, mesh_of

from jgt.pipeline.schedule import VIRTUAL

MESHES = [
    {"stage": stage, "tensor": tensor, "data": data}
    for stage, tensor, data in itertools.product((2, 4), (1, 2), (1, 2))
    if stage * tensor * data <= 8
]


def name_of(sizes):
    return "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)


@pytest.fixture(scope="module")
def decoder():
    """The decoder with a number of layers."""
    known = {}

    def _decoder(num_layers):
        if num_layers not in known:
            known[num_layers] = case(decoder_loss, make_params(num_layers))
        return known[num_layers]

    return _decoder


@pytest.mark.parametrize("sizes", MESHES, ids=name_of)
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_every_schedule_on_every_mesh(decoder, schedule, sizes):
    assert_exact(decoder(8), mesh_of(**sizes), schedule=schedule)
