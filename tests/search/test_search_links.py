"""What estimates take from the links of a target and from the depths of stages."""

from jgt.hardware.chip import parse_target
from train.search.columns import Columns
from train.search.layout import Candidate, Stages
from train.search.step import send_time


def test_a_ring_over_hosts_uses_one_port_of_a_host():
    seconds = send_time(parse_target("h100:2x8"))
    inside, over = {"data": 2, "tensor": 8}, {"tensor": 16}
    assert seconds(over, ["tensor"], 1e9, is_ring=True) > 4 * seconds(over, ["tensor"], 1e9)
    assert seconds(over, ["tensor"], 1e9, is_ring=True) > 4 * seconds(inside, ["tensor"], 1e9, is_ring=True)


def test_stages_of_different_depths_wait_for_the_deepest():
    def pipeline(stages):
        how = Stages(schedule="1f1b", virtual=None, microbatches=64, remat="none", gather="step")
        return Candidate(mesh=(("stage", stages),), rules="jgt:pipeline", batch_axes=(), accumulate=1, rows=1, remat=None, stages=how)

    # 36 layers in 16 stages: some have 3, and 2.25 are the mean.
    assert Columns([pipeline(12), pipeline(16)], 36).uneven.tolist() == [1.0, 48 / 36]
    assert Columns([pipeline(16)], None).uneven.tolist() == [1.0]
