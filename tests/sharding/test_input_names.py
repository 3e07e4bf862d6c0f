"""Rules name the arguments besides the parameters by the name of the argument, by its position, or by the end of a path."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jgt

MESH = jgt.make_mesh({"data": 2, "tensor": 4})
X = jnp.ones((8, 8))


def distill(params, student, teacher, *, mask=X):
    return jnp.sum((student["x"] + teacher["x"]) @ params["w"] * mask)


def specs(inputs, fn=distill):
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "inputs": inputs, "default": "replicate"})
    placement = jgt.place(fn, rules, MESH, {"w": X}, {"x": X}, {"x": X}, partial=True)
    return [placement.inputs({"x": X}, argument)["x"].spec for argument in (None, "teacher")]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"student/x": ["data", None], "teacher/x": [None, "tensor"]}, [P("data", None), P(None, "tensor")]),
        ({"teacher/**": [None, "tensor"], "x": ["data", None]}, [P("data", None), P(None, "tensor")]),
        ({"{student,tutor}/*": ["data", None]}, [P("data", None), P()]),
        ({"1/x": ["data", None], "2/x": [None, "tensor"]}, [P("data", None), P(None, "tensor")]),
        ({"x": ["data", None]}, [P("data", None), P("data", None)]),
        ({"*": ["data", None]}, [P("data", None), P("data", None)]),
        (["batch", ...], [P("data", None), P("data", None)]),
    ],
)
def test_two_arguments_with_entries_of_one_name(inputs, expected):
    assert specs(inputs) == expected


def test_the_program_is_laid_out_as_the_placement_says():
    rules = jgt.make_rules({"inputs": {"teacher/x": [None, "tensor"], "mask": ["data"]}, "default": "replicate"})
    sharded = jgt.shard(distill, rules, MESH)
    assert sharded({"w": X}, {"x": X}, {"x": X}, mask=X) == 8 * 8 * 16
    # Neither rule is reported as one that matches nothing, and a wrong name is.
    with pytest.raises(jgt.InputError, match="inputs: techer/x: no argument of that name and rank"):
        jgt.shard(distill, jgt.make_rules({"inputs": {"techer/x": []}, "default": "replicate"}), MESH)({"w": X}, {"x": X}, {"x": X})


def test_an_array_is_named_by_its_argument_its_position_or_its_keyword():
    fn = lambda params, x, *rest, **named: jnp.sum(params["w"] @ x) + sum(map(jnp.sum, rest)) + jnp.sum(named["mask"])  # noqa: E731
    for pattern in ("x", "1", "2", "mask"):
        rules = jgt.make_rules({"inputs": {pattern: ["data"]}, "default": "replicate"})
        jgt.place(fn, rules, MESH, {"w": X}, X, X, mask=X)


def test_a_function_without_a_signature_has_positions():
    class Opaque:
        __signature__ = "none"

        def __call__(self, params, student, teacher):
            return distill(params, student, teacher)

    assert specs({"1/x": ["data", None]}, Opaque())[0] == P("data", None)
