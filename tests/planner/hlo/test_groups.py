"""Groups of devices in every notation of XLA, compared with groups counted device by device."""

import collections
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgt.planner.hlo.groups import axes_between, groups_of
from jgt.planner.hlo.instruction import Instruction

MESH = {"data": 2, "stage": 2, "tensor": 2}
ONE = ((0, 1, 2, 3, 4, 5, 6, 7),)
DATA = ((0, 4), (1, 5), (2, 6), (3, 7))
STAGE = ((0, 2), (1, 3), (4, 6), (5, 7))
TENSOR = ((0, 1), (2, 3), (4, 5), (6, 7))
STAGE_TENSOR = ((0, 1, 2, 3), (4, 5, 6, 7))
DATA_TENSOR = ((0, 1, 4, 5), (2, 3, 6, 7))
ALONE = tuple((d,) for d in range(8))
WRITTEN = {
    "{}": ONE,
    "{{0},{1},{2},{3},{4},{5},{6},{7}}": ALONE,
    "{{0,2},{1,3},{4,6},{5,7}}": STAGE,
    "{{0,1,2,3},{4,5,6,7}}": STAGE_TENSOR,
    "{{0,1,2,3}, {4,5,6,7}}": STAGE_TENSOR,
    "[1,8]<=[8]": ONE,
    "[8,1]<=[8]": ALONE,
    "[4,2]<=[8]": TENSOR,
    "[2,4]<=[8]": STAGE_TENSOR,
    "[4,2]<=[2,4]T(1,0)": DATA,
    "[4,2]<=[2,2,2]T(0,2,1)": STAGE,
    "[2,4]<=[2,2,2]T(1,0,2)": DATA_TENSOR,
    "mesh['data'=2,'fsdp'=1,'stage'=2,'tensor'=2] {'stage'}": STAGE,
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": DATA,
    "mesh[axis_0=2,axis_1=4] {axis_0}": DATA,
    "mesh['a'=4,'b'=2] {'a'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['a'=4,'b'=2] {'a','b'}": ONE,
    "mesh['a'=4,'b'=2] {'a':(1)2}": DATA,
    "mesh['a'=4,'b'=2] {'a':(2)2}": STAGE,
    "mesh[a=4,b=2] {a:(2)2}": STAGE,
    "mesh['a'=4,'b'=2] {'a':(1)2,'b'}": DATA_TENSOR,
    "mesh['a'=8] {'a':(2)2}": STAGE,
    "mesh['a'=8] {'a':(1)2,'a':(4)2}": DATA_TENSOR,
    "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'a'}": TENSOR,
    "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'b','c'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['a'=8], device_ids=([2,4]T(1,0)) {'a':(4)2}": DATA,
    "mesh['a'=2,'b'=4], device_ids=(0,2,1,3,4,6,5,7) {'a'}": DATA,
    "mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'b'}": STAGE,
}


def collective(groups, op="all-reduce"):
    text = f'%y), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add, metadata={{op_name="a/(b:c)" stack_frame_id=1}}'
    return Instruction(name="one", op=op, shape="f32[4]{0}", text=text)


def unordered(groups):
    return {frozenset(group) for group in groups}


@pytest.mark.parametrize("text", WRITTEN)
def test_groups(text):
    assert unordered(groups_of(collective(f"replica_groups={text}"), 8)) == unordered(WRITTEN[text])


def test_all_devices_are_those_of_the_program():
    assert groups_of(collective("replica_groups={}"), 3) == ((0, 1, 2),)


def test_groups_at_the_end_of_a_line():
    assert groups_of(Instruction(name="one", op="all-reduce", shape="f32[]", text="%y), replica_groups=[2,1]<=[2]"), 2) == ((0,), (1,))


def test_one_replica_without_global_ids_is_all_its_devices():
    text = "%y), channel_id=1, replica_groups={{0}}, to_apply=%add"
    assert groups_of(Instruction(name="one", op="all-reduce", shape="f32[4]", text=text), 8) == ONE


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("{{0,2},{4,6}}", ((0, 2), (4, 6))),
        ("{{0,1},{1,2}, {2,0}}", ((0, 1), (1, 2), (2, 0))),
        ("{}", ()),
    ],
)
def test_pairs_of_source_and_target(text, pairs):
    assert groups_of(collective(f"source_target_pairs={text}", "collective-permute"), 8) == pairs


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (ONE, ("data", "stage", "tensor")),
        (ALONE, ()),
        (DATA_TENSOR, ("data", "tensor")),
        (((0, 2), (4, 6)), ("stage",)),
        (((0, 1), (1, 2)), ("stage", "tensor")),
        ((), ()),
    ],
)
def test_the_axes_of_groups(groups, axes):
    assert axes_between(groups, MESH) == axes


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups=every(2)",
        "replica_groups=[4,2]<=ring[8]",
        "replica_groups=[4,2]<=[9]",
        "replica_groups=mesh['a'=8] {'a':half}",
        "replica_groups=mesh['a'=8] {'b'}",
        "replica_groups=mesh['a'=8], device_ids=(all) {'a'}",
        "source_target_pairs=ring(8)",
        "",
    ],
)
def test_an_unknown_notation_is_an_error_that_names_the_collective(text):
    with pytest.raises(ValueError, match="the groups of all-reduce one "):
        groups_of(collective(text), 8)


# -- any mesh ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """Mesh axes by size, and the part of each along which a group extends: (product of the parts before, size), or None.

    order: the order in which the axes are written.
    """

    sizes: tuple[int, ...]
    parts: tuple[tuple[int, int] | None, ...]
    order: tuple[int, ...]

    @property
    def mesh(self):
        return {f"axis_{n}": size for n, size in enumerate(self.sizes)}

    @property
    def axes(self):
        return tuple(f"axis_{n}" for n, part in enumerate(self.parts) if part and part[1] > 1)

    def groups(self):
        """Devices form a group if they differ only in the parts along which it extends."""
        found = collections.defaultdict(list)
        for device, place in enumerate(itertools.product(*map(range, self.sizes))):
            rest = []
            for index, size, part in zip(place, self.sizes, self.parts, strict=True):
                before, own = part or (1, 1)
                after = size // (before * own)
                rest.append((index // (own * after), index % after))
            found[tuple(rest)].append(device)
        return list(found.values())


def sub_axes(size):
    """All parts of an axis as (product of the parts before, size). XLA does not write parts of size 1."""
    found = [(before, own) for before in range(1, size + 1) for own in range(2, size + 1)]
    return [(before, own) for before, own in found if size % (before * own) == 0]


@st.composite
def extents(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 96))
    parts = []
    for size in sizes:
        parts.append(draw(st.sampled_from([None, (1, size), *sub_axes(size)])))
    return Extent(tuple(sizes), tuple(parts), tuple(draw(st.permutations(range(len(sizes))))))


def explicit(one):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in one.groups()) + "}"


def iota(one):
    """Each axis as three dims (before, part, after), with the parts moved last."""
    dims, own = [], []
    for size, part in zip(one.sizes, one.parts, strict=True):
        before, width = part or (1, 1)
        own.append(len(dims) + 1)
        dims += [before, width, size // (before * width)]
    order = [d for d in range(len(dims)) if d not in own] + own
    width = math.prod(dims[d] for d in own)
    return f"[{math.prod(dims) // width},{width}]<=[{comma(dims)}]T({comma(order)})"


def comma(numbers):
    return ",".join(map(str, numbers))


def mesh_axes(one, quote, order):
    """The mesh, and the axes or parts along which a group extends. A whole axis is written as its name alone."""
    mesh = ",".join(f"{quote}axis_{n}{quote}={one.sizes[n]}" for n in order)
    spans = []
    for n in order:
        if part := one.parts[n]:
            spans.append(f"{quote}axis_{n}{quote}" + ("" if part == (1, one.sizes[n]) else f":({part[0]}){part[1]}"))
    return f"mesh[{mesh}]", "{" + ",".join(spans) + "}"


def named(one, quote):
    return " ".join(mesh_axes(one, quote, range(len(one.sizes))))


def turned(one):
    """The axes in another order, over the same devices in the same places."""
    mesh, spans = mesh_axes(one, "'", one.order)
    return f"{mesh}, device_ids=([{comma(one.sizes)}]T({comma(one.order)})) {spans}"


def listed(one):
    mesh, spans = mesh_axes(one, "'", one.order)
    ids = np.arange(math.prod(one.sizes)).reshape(one.sizes).transpose(one.order)
    return f"{mesh}, device_ids=({comma(ids.flat)}) {spans}"


@pytest.mark.parametrize(
    "write",
    [explicit, iota, lambda one: named(one, "'"), lambda one: named(one, ""), turned, listed],
    ids=["explicit", "iota", "mesh", "mesh without quotes", "mesh in another order", "mesh of listed devices"],
)
@settings(max_examples=60, deadline=None)
@given(one=extents())
def test_groups_of_any_part_of_any_mesh(write, one):
    groups = groups_of(collective(f"replica_groups={write(one)}"), math.prod(one.sizes))
    assert unordered(groups) == unordered(one.groups())
    assert axes_between(groups, one.mesh) == one.axes
