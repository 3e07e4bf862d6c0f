"""A picture says of each part what JAX says of the devices, as text and as an SVG."""

import math
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jgt

MESH = jgt.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
SPECS = [
    ((8, 4), P("data", "tensor")),
    ((8, 4), P(None, ("tensor", "fsdp"))),
    ((8, 4), P("fsdp")),
    ((3, 8, 4), P(None, "tensor", None)),
    ((8, 4, 2, 6), P("tensor", None, "data", "fsdp")),
    ((8, 8), P(("tensor", "data"), "fsdp")),
    ((8,), P("tensor")),
    ((4, 4), P()),
    ((), P()),
]


def array(shape, spec, mesh=MESH):
    return jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))


@pytest.mark.parametrize(("shape", "spec"), SPECS)
def test_cells_are_the_parts_that_jax_puts_on_devices(shape, spec):
    x = array(shape, spec)
    (grid,) = jgt.picture(x).grids
    held = {}
    for device, index in x.sharding.devices_indices_map(shape).items():
        held.setdefault(tuple((s.start or 0, s.stop) for s in index), set()).add(device.id)
    # Parts in the order of their indices, the last dim first: as the grid is read, row by row.
    expected = [held[index] for index in sorted(held)]
    _, columns = grid.size
    assert [set(ids) for row in grid.devices for ids in row] == expected
    last = (list(spec) + [None] * len(shape))[len(shape) - 1] if shape else None
    assert columns == (math.prod(MESH.shape[a] for a in ((last,) if isinstance(last, str) else last or ())))
    ((path, dims, size, padding),) = grid.tensors
    assert path == "(itself)" and padding == "" and size.startswith(f"{x.addressable_shards[0].data.nbytes} B")
    assert re.findall(r"\d+", dims) == [str(n) for n in shape]


def test_tensors_that_are_split_alike_are_one_grid_and_padding_is_shown():
    shapes = {"a/up": (2, 8, 10), "b/up": (6, 10), "down": (10, 8), "bias": (3,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    rules = {"params": {"up": [None, "tensor"], "down": ["tensor", None]}, "default": "replicate"}

    def loss(params, x):
        return sum(jnp.sum(w.astype(jnp.float32)) for w in jax.tree.leaves(params)) * x

    rules["params"]["a/up"] = [None, None, "tensor"]
    sharded = jgt.shard(loss, rules, jgt.abstract_mesh({"data": 2, "tensor": 4}), pad=True)
    picture = jgt.picture(sharded, params, jnp.float32(1))
    assert [[row[0] for row in grid.tensors] for grid in picture.grids] == [["a/up", "b/up"], ["down"], ["bias"]]
    assert str(jgt.picture(sharded.placement(params, jnp.float32(1)))) == str(picture)
    assert "    b/up  6 x 10/tensor      36 B a device  20.0% padding" in str(picture).splitlines()
    assert "whole on each of 8 devices" in str(picture) and "  [0-7]" in str(picture)
    assert "  [0,4][1,5][2,6][3,7]" in str(picture)


def test_a_large_grid_is_cut():
    mesh = jgt.abstract_mesh({"data": 4, "fsdp": 32})
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", "data")))
    text = str(jgt.picture(x))
    assert "32 x 4 parts over fsdp x data, 1 copy of each; the first 16 x 4 are shown" in text
    assert text.count("[") == 16 * 4


def test_the_svg_has_the_cells_and_escapes_names():
    picture = jgt.picture({'<w>&"': array((8, 4), P("data", "tensor")), "v": array((8,), P())})
    root = ElementTree.fromstring(picture.svg)
    names = "{http://www.w3.org/2000/svg}"
    cells = [rect for rect in root.iter(f"{names}rect") if rect.get("stroke")]
    texts = [text.text for text in root.iter(f"{names}text")]
    assert len(cells) == 4 + 1 and len({rect.get("fill") for rect in cells[:4]}) == 4
    assert '<w>&"' in texts and {"0,2", "1,3", "4,6", "5,7", "0-7"} <= set(texts)
    width, height = (float(root.get(size)) for size in ("width", "height"))
    assert all(float(r.get("x")) + float(r.get("width")) <= width and float(r.get("y")) <= height for r in cells)
    assert picture._repr_svg_() == picture.svg


def test_it_prints_in_colours_or_plain(capsys):
    picture = jgt.picture(array((8, 4), P("data", "tensor")))
    picture.show()
    assert capsys.readouterr().out == f"{picture}\n"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lambda: {"a": np.zeros(3)}, "picture: arrays on no mesh"),
        (lambda: [array((8,), P()), jnp.zeros(3)], "picture: arrays on no mesh"),
        (lambda: [array((8,), P()), array((8,), P(), jgt.make_mesh({"x": 8}))], "picture: arrays on several meshes"),
        (dict, "picture: arrays on no mesh"),
    ],
)
def test_what_has_no_picture(arrays, message):
    with pytest.raises(jgt.InputError, match=message) as caught:
        jgt.picture(arrays())
    assert len(caught.value.problems) == 1
