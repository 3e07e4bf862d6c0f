"""Trees by parameter in two parts, by the patterns of what is trained."""

import pytest

from train.step.trained import Trained, divided, merged

TREE = {"embed": {"embedding": 1}, "layers": {"attn": {"out": {"kernel": 2, "bias": 3}}, "mlp": {"out": {"kernel": 4}}}, "empty": {}}


@pytest.mark.parametrize(
    ("patterns", "trained", "frozen"),
    [
        (None, TREE, {}),
        (("**",), TREE, {}),
        (
            ("bias",),
            {"layers": {"attn": {"out": {"bias": 3}}}, "empty": {}},
            {**TREE, "layers": {"attn": {"out": {"kernel": 2}}, "mlp": TREE["layers"]["mlp"]}},
        ),
        (("attn/**", "embed*"), {**TREE, "layers": {"attn": TREE["layers"]["attn"]}}, {"layers": {"mlp": TREE["layers"]["mlp"]}}),
    ],
)
def test_a_tree_is_divided_by_patterns_and_merged_again(patterns, trained, frozen):
    parts = Trained(patterns).split(TREE)
    assert parts == (trained, {name: x for name, x in frozen.items() if x})
    assert merged(*parts) == TREE


def test_of_two_leaves_at_a_path_the_others_is_taken():
    assert merged(TREE, {"layers": {"mlp": {"out": {"kernel": 5}}}})["layers"] == {**TREE["layers"], "mlp": {"out": {"kernel": 5}}}


def test_paths_are_whole():
    assert divided({"a": {"b": 1}, "ab": 2}, {"a/b"}.__contains__) == ({"a": {"b": 1}}, {"ab": 2})
