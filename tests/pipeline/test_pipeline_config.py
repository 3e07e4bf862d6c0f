"""The options of a pipeline, and those that only the reader of a run's file sets."""

import jgt

PIPELINE = jgt.Pipeline(signal="layers", microbatches=2, schedule="zb", per_microbatch=("moe",))
LINES = {"": "a.yaml:1", "schedule": "a.yaml:2"}


def test_lines_and_the_type_of_gradients_are_set_in_any_order():
    for changed in (PIPELINE.reducing("bf16").located(LINES), PIPELINE.located(LINES).reducing("bf16")):
        assert (changed.gradients, changed.lines) == ("bf16", LINES)
        assert (changed.schedule, changed.per_microbatch) == ("zb", ("moe",))
    assert (PIPELINE.gradients, PIPELINE.lines) == ("f32", {})


def test_only_the_type_of_gradients_makes_other_options():
    assert PIPELINE.located(LINES) == PIPELINE
    assert hash(PIPELINE.located(LINES)) == hash(PIPELINE)
    assert PIPELINE.reducing("bf16") != PIPELINE


def test_a_message_begins_with_the_line_of_the_key_or_of_the_section():
    located = PIPELINE.located(LINES)
    assert [located.where(key) for key in ("schedule", "axis")] == ["a.yaml:2: pipeline.schedule", "a.yaml:1: pipeline.axis"]
    assert PIPELINE.problem("axis", "is odd") == "pipeline: axis: is odd"
