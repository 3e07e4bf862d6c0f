"""Axes of shipped rules on a mesh that lacks them, and axes that are a slip."""

from dataclasses import replace

import pytest

from jgt.rules import Rules, load_rules, make_rules


@pytest.mark.parametrize(
    ("name", "axes", "missing"),
    [
        ("fsdp_tensor", ("fsdp", "tensor"), ("data",)),
        ("fsdp_tensor", ("data",), ("fsdp", "tensor")),
        ("fsdp_tensor", ("data", "fsdp", "tensor"), ()),
        # An axis that they do not name may be a slip for one that is missing.
        ("fsdp_tensor", ("fsdp", "tensr"), ()),
        ("zero1", ("fsdp",), ()),
        ("context", ("fsdp",), ("data", "seq", "tensor")),
        ("experts", ("fsdp",), ("data", "expert")),
    ],
)
def test_missing_axes_have_size_one(name, axes, missing):
    rules = load_rules(f"jgt:{name}")
    on_mesh = rules.on(axes)
    assert (on_mesh is rules) == (not missing)
    assert bool(list(on_mesh.axis_problems(axes))) == (not missing and axes != ("data", "fsdp", "tensor"))


def test_rules_on_a_mesh_without_an_axis_say_nothing_of_it():
    tree = {"axes": {"batch": ["data", "fsdp"]}, "params": {"w": [["tensor", "fsdp"], None]}, "otherwise": {"params": ["fsdp", "tensor"]}}
    signals = {"a": {"tensors": {"x": ["tensor"]}, "out": ["data"], "backward": {"out": ["tensor"]}, "overlap": "tensor"}}
    rules = replace(make_rules({**tree, "signals": signals}), where=load_rules("jgt:fsdp").where).on(["fsdp"])
    tree = {"axes": {"batch": ["fsdp"]}, "params": {"w": ["fsdp", None]}, "otherwise": {"params": ["fsdp"]}}
    signals = {"a": {"tensors": {"x": [None]}, "out": [None], "backward": {"out": [None]}}}
    assert rules == make_rules({**tree, "signals": signals})


def test_rules_of_ones_own_name_their_axes():
    rules = make_rules({"axes": {"batch": ["data", "fsdp"]}})
    assert not rules.is_shipped and rules.on(["data"]) is rules
    assert isinstance(rules, Rules) and list(rules.axis_problems(["data"]))
