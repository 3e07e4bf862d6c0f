"""Predicted time of hand-written schedules, on hardware that does one FLOP a second and sends one byte a second."""

import dataclasses

import pytest

from jgt.planner.hardware.chip import Link, load_chip
from jgt.planner.hardware.rates import AttentionRate, MatmulRate, MemoryRate, Rates
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.text import Module
from jgt.planner.timeline import HOST_AXES, Timeline

MESH = {"data": 2, "tensor": 4}
RATES = Rates(
    matmul={"bf16": MatmulRate(share=1)}, attention=AttentionRate(forward=1, backward=1), memory=MemoryRate(share=1), launch_us=0, beside=1
)
SLOW = dataclasses.replace(
    load_chip("h100"),
    tflops={"bf16": 1e-12, "tf32": 1e-12},
    hbm_gbs=float("inf"),
    host_gbs=1e-9 / 2,
    power_w=1,
    rated_w=1,
    rates=RATES,
    links={
        "near": Link(gbs=1e-9, domain="host", share=1, start_us=0, hop_us=0),
        "far": Link(gbs=1e-9 / 4, domain="all", share=1, start_us=0, hop_us=0),
    },
)
DOT, SMALL, TINY = 2 * 8 * 8 * 8, 2 * 8 * 8, 2 * 8
GATHER = 3 * 4 * 4
"""FLOPs of the matmuls, and bytes that a device sends for an all-gather of its f32[4] over 4 devices."""

NAMED = 'metadata={op_name="jit(f)/%s/x"}'
OVER_TENSOR = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, dimensions={0}"
OVER_DATA = "channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, dimensions={0}"
LINES = {
    "start": f"%start = (f32[4], f32[16]) all-gather-start(%shard), {OVER_TENSOR}, {NAMED % 'sig.weights'}",
    "done": f"%done = f32[16] all-gather-done(%start), {NAMED % 'sig.weights'}",
    "start again": f"%start2 = (f32[4], f32[16]) all-gather-start(%shard), {OVER_TENSOR}, {NAMED % 'sig.others'}",
    "done again": f"%done2 = f32[16] all-gather-done(%start2), {NAMED % 'sig.others'}",
    "sync": f"%sync = f32[16] all-gather(%shard), {OVER_TENSOR}, {NAMED % 'sig.weights'}",
    "async start": f"%begin = ((f32[4]), f32[16]) async-start(%shard), calls=%gather, {NAMED % 'sig.weights'}",
    "async done": f"%finish = f32[16] async-done(%begin), {NAMED % 'sig.weights'}",
    "between": f"%far = f32[8] all-gather(%shard), {OVER_DATA}, {NAMED % 'sig.weights'}",
    "dot": f"%dot = f32[8,8] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {NAMED % 'transpose(jvp(sig.mlp))'}",
    "small": f"%small = f32[8] dot(%x, %v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {NAMED % 'sig.mlp'}",
    "tiny": f"%tiny = f32[] dot(%v, %v), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, {NAMED % 'sig.mlp'}",
    "add": f"%add = f32[8,8] add(%x, %x), {NAMED % 'sig.mlp'}",
    "loop": '%loop = (s32[]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}',
    "loop of unknown length": "%loop = (s32[]) while(%init), condition=%cond, body=%body",
    "to host": "%keep = (f32[8]{0:S(5)}, f32[8], u32[]) copy-start(%v), " + NAMED % "sig.optimizer",
    "to host done": "%kept = f32[8]{0:S(5)} copy-done(%keep)",
    "from host": "%fetch = (f32[8], f32[8]{0:S(5)}, u32[]) copy-start(%v), " + NAMED % "sig.optimizer",
    "from host done": "%fetched = f32[8] copy-done(%fetch)",
    "inside": "%near = (f32[8], f32[8], u32[]) copy-start(%v)",
    "inside done": "%nearer = f32[8] copy-done(%near)",
    "sometimes": "%sometimes = f32[8,8] conditional(%flag, %x, %x), branch_computations={%taken, %other}",
    "branch": "%branch = f32[8,8] conditional(%flag, %x, %x), branch_computations={%one, %other}",
}
PARAMETERS = """\
  %shard = f32[4] parameter(0)
  %x = f32[8,8] parameter(1)
  %v = f32[8] parameter(2)
  %flag = pred[] parameter(3)
  %init = (s32[]) tuple()
"""
OTHERS = f"""\
%cond (p: (s32[])) -> pred[] {{
  %p = (s32[]) parameter(0)
  ROOT %more = pred[] constant(true)
}}

%gather (p: f32[4]) -> f32[16] {{
  %shard = f32[4] parameter(0)
  ROOT {LINES["sync"]}
}}

%one (p: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  ROOT {LINES["add"]}
}}

%taken (p: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %v = f32[8] slice(%x)
  ROOT {LINES["small"].replace("jit(f)/", "jit(f)/jgt.taken.3of4/")}
}}

%other (p: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  ROOT {LINES["dot"]}
}}
"""


def hosts(num, chip=SLOW):
    """The network of 8 devices on `num` hosts."""
    return Target(chip=chip, text="slow", num_hosts=num, per_host=8 // num).network([d * num // 8 for d in range(8)])


ONE_HOST = hosts(1)


def timeline(*schedule, body=(), network=ONE_HOST):
    """The walk through a program with these lines, on a mesh of 8 devices."""
    text = (
        f"HloModule step, is_scheduled=true\n\n{OTHERS}\n"
        f"%body (p: (s32[])) -> (s32[]) {{\n{lines(body)}}}\n\nENTRY %main () -> (s32[]) {{\n{lines(schedule)}}}\n"
    )
    return Timeline(Module.parse(text), MESH, 8, network).step()


def lines(schedule):
    """These lines in order. A repeated name gets a number."""
    numbered = [LINES[line].replace(" =", f".{n} =", 1) if line in schedule[:n] else LINES[line] for n, line in enumerate(schedule)]
    return PARAMETERS + "".join(f"  {line}\n" for line in numbered) + "  ROOT %end = (s32[]) tuple()\n"


def exposed(walk):
    """Seconds spent waiting, by signal."""
    return {signal: cost.exposed for (signal, _), cost in walk.costs.items() if cost.exposed}


def test_a_collective_behind_more_work_than_it_takes_is_hidden():
    walk = timeline("start", "dot", "done")
    assert walk.seconds == DOT > GATHER
    assert exposed(walk) == walk.exposed == {}
    assert walk.links == {("tensor",): GATHER}


def test_what_is_left_of_a_collective_after_the_work_beside_it_is_exposed():
    walk = timeline("start", "start again", "tiny", "done", "done again")
    assert TINY < GATHER
    assert walk.seconds == 2 * GATHER
    assert exposed(walk) == {"weights": GATHER - TINY, "others": GATHER}


def test_a_collective_runs_beside_what_stands_between_its_start_and_its_end_only():
    walk = timeline("small", "start", "add", "done", "small")
    assert walk.seconds == SMALL + GATHER + SMALL
    assert exposed(walk) == {"weights": GATHER}


def test_a_collective_that_is_not_asynchronous_is_exposed_in_full():
    walk = timeline("small", "sync", "dot")
    assert walk.seconds == SMALL + GATHER + DOT
    assert exposed(walk) == {"weights": GATHER}


def test_a_collective_in_an_asynchronous_computation_is_an_asynchronous_collective():
    walk = timeline("async start", "tiny", "async done")
    assert walk.seconds == GATHER
    assert exposed(walk) == {"weights": GATHER - TINY}
    assert walk.links == {("tensor",): GATHER}
    assert walk.exposed == {("tensor",): GATHER - TINY}


def test_collectives_share_the_link():
    walk = timeline("start", "start again", "done", "done again")
    assert walk.seconds == 2 * GATHER
    assert exposed(walk) == {"weights": GATHER, "others": GATHER}


def test_a_loop_counts_as_often_as_it_runs():
    walk = timeline("small", "loop", body=("small", "sync"))
    assert walk.seconds == SMALL + 5 * (SMALL + GATHER)
    assert exposed(walk) == {"weights": 5 * GATHER}
    assert walk.links == walk.exposed == {("tensor",): 5 * GATHER}
    assert sum(cost.flops for cost in walk.costs.values()) == 6 * SMALL


def test_a_loop_of_unknown_length_counts_once():
    assert timeline("loop of unknown length", body=("small",)).seconds == SMALL


def test_the_longest_branch_counts():
    assert timeline("branch").seconds == DOT


def test_branches_count_by_their_shares_and_the_rest_is_left_for_those_that_say_nothing():
    assert timeline("sometimes").seconds == 0.75 * SMALL + 0.25 * DOT


def test_a_transfer_to_the_host_runs_beside_kernels_and_beside_one_from_it():
    transfer = 2 * 8 * 4
    walk = timeline("to host", "from host", "tiny", "to host done", "from host done")
    assert walk.seconds == transfer > TINY
    assert walk.links == {HOST_AXES: 2 * transfer}
    assert exposed(walk) == {"optimizer": transfer - TINY}
    assert timeline("inside", "inside done").seconds == 0


def test_a_kernel_beside_a_collective_takes_longer():
    network = hosts(1, dataclasses.replace(SLOW, rates=dataclasses.replace(RATES, beside=1.5)))
    assert timeline("start", "tiny", "done", "dot", network=network).seconds == GATHER + DOT
    assert timeline("start", "dot", "done", network=network).seconds == DOT + GATHER * 0.5
    assert timeline("dot", network=network).seconds == DOT


def test_the_parts_add_up_to_the_step():
    walk = timeline("small", "sync", "dot", "branch")
    assert walk.parts == {"matmul": SMALL + 2 * DOT, "exposed": GATHER, "launch": 0, "bubble": 0}
    assert sum(walk.parts.values()) == walk.seconds


def test_flops_belong_to_signal_and_phase():
    walk = timeline("dot", "small", "small")
    assert {key: cost.flops for key, cost in walk.costs.items()} == {("mlp", "backward"): DOT, ("mlp", "forward"): 2 * SMALL}


def test_between_hosts_the_port_is_what_counts():
    # Two hosts of 4: a group over data has one device in each, and the port is four times slower.
    assert timeline("between", network=hosts(2)).seconds == 4 * (4 * 4)
    assert timeline("sync", network=hosts(2)).seconds == GATHER


def test_a_kernel_takes_the_longer_of_its_flops_and_its_bytes_and_a_launch():
    chip = dataclasses.replace(SLOW, hbm_gbs=1e-9, rates=dataclasses.replace(RATES, launch_us=7e6))
    assert DOT > 3 * 8 * 8 * 4
    assert timeline("dot", network=hosts(1, chip)).seconds == pytest.approx(DOT + 7)
    assert SMALL < (8 * 8 + 8 + 8) * 4
    assert timeline("small", network=hosts(1, chip)).seconds == pytest.approx((8 * 8 + 8 + 8) * 4 + 7)


@pytest.mark.parametrize("schedule", [("start", "dot", "done"), ("sync", "dot")])
def test_without_a_network_only_flops_count(schedule):
    walk = timeline(*schedule, network=None)
    assert walk.seconds == 0
    assert exposed(walk) == {}
    assert sum(cost.compute for cost in walk.costs.values()) == 0
    assert set(walk.links.values()) == {0.0}
    assert sum(cost.flops for cost in walk.costs.values()) == DOT


SHARED = dataclasses.replace(SLOW, devices=8, fresh_gbs=1e-9)


def test_what_idle_stages_skip_takes_no_time_on_a_shared_processor():
    text = f"""HloModule step, is_scheduled=true

%layer (p: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  ROOT {LINES["dot"].replace("jit(f)/", "jit(f)/jgt.useful.3of4/")}
}}

%nothing (p: f32[8,8]) -> f32[8,8] {{
  ROOT %x = f32[8,8] parameter(0)
}}

ENTRY %main (on: pred[], x: f32[8,8]) -> f32[8,8] {{
  %on = pred[] parameter(0)
  %x = f32[8,8] parameter(1)
  ROOT %y = f32[8,8] conditional(%on, %x, %x), true_computation=%layer, false_computation=%nothing
}}
"""

    def walk(chip):
        return Timeline(Module.parse(text), MESH, 8, hosts(1, chip)).step()

    alone, shared = walk(SLOW), walk(SHARED)
    assert alone.seconds == DOT
    assert alone.parts["bubble"] == DOT / 4
    assert shared.seconds == sum(shared.parts.values()) == sum(cost.compute for cost in shared.costs.values()) == DOT * 3 / 4
    assert shared.parts["bubble"] == 0


def test_temporary_memory_takes_time_where_each_run_gets_it_anew():
    module = Module.parse("HloModule step\n\nENTRY %main () -> (s32[]) {\n  ROOT %t = (s32[]) tuple()\n}\n")
    program = Timeline(module, MESH, 8, hosts(1, SHARED))
    assert program.step(50).seconds == pytest.approx(50)
    assert program.step(50).parts["memory"] == pytest.approx(50)
    assert Timeline(module, MESH, 8, ONE_HOST).step(50).seconds == 0
