"""The time of collectives on links that form levels: hosts, racks and the network between them."""

import dataclasses

import pytest

from jgt.planner.hardware.chip import Link, load_chip
from jgt.planner.hardware.network import Level
from jgt.planner.hardware.target import Target

NEAR = Link(gbs=1.0, domain="host", share=1.0, start_us=0.0, hop_us=0.0)
FAR = Link(gbs=0.25, domain="all", share=1.0, start_us=0.0, hop_us=0.0)
GB = 10**9


def network(num_hosts, per_host, **links):
    chip = dataclasses.replace(load_chip("h100"), links=links or {"near": NEAR, "far": FAR})
    hosts = [device // per_host for device in range(num_hosts * per_host)]
    return Target(chip=chip, text="test", num_hosts=num_hosts, per_host=per_host).network(hosts)


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        ((0, 1, 2, 3), 1),  # one host: the near links alone
        ((0, 4), 4),  # one device of each of two hosts: its own port
        ((0, 1, 4, 5), 2),  # two of each: half of the bytes through each port
        (tuple(range(8)), 1),  # four of each: as fast as the near links
        ((0, 1, 2, 4), 4),  # the host with the fewest members has the fewest ports
    ],
)
def test_the_slowest_level_counts_and_members_share_the_ports_of_their_host(group, seconds):
    assert network(2, 4).seconds([group], GB) == seconds


def test_the_slowest_group_counts_and_no_group_takes_no_time():
    two = network(2, 4)
    assert two.seconds([(0, 1), (0, 4)], GB) == 4
    assert two.seconds([], GB) == 0


def test_in_an_exchange_of_all_with_all_each_device_sends_what_leaves_its_host_through_its_own_port():
    # 4 of the 7 others are on the other host.
    assert network(2, 4).seconds([tuple(range(8))], 7 * GB, "all-to-all") == 4 * 4
    assert network(2, 4).seconds([(0, 1, 2, 3)], 3 * GB, "all-to-all") == 3


def test_hops_are_the_steps_of_a_ring():
    links = {"near": dataclasses.replace(NEAR, hop_us=1e6, start_us=10e6), "far": dataclasses.replace(FAR, hop_us=100e6, start_us=20e6)}
    two = network(2, 4, **links)
    assert two.seconds([(0, 1, 2, 3)], 0) == 10 + 3
    # 6 of 7 steps stay in a host.
    assert two.seconds([tuple(range(8))], 0) == 20 + 6 + 100
    assert two.seconds([tuple(range(8))], 0, "all-reduce") == 20 + 2 * (6 + 100)
    assert two.seconds([(0, 4)], 0, "collective-permute") == 20 + 100


def test_an_all_reduce_takes_the_faster_of_a_ring_and_trees():
    # Two hosts of four: a tree has a chain of three hops in a host, and one hop between hosts.
    links = {"near": dataclasses.replace(NEAR, hop_us=1e6, low_us=1e5), "far": dataclasses.replace(FAR, hop_us=1e7, low_us=1e6)}
    two, everybody = network(2, 4, **links), [tuple(range(8))]
    assert two.seconds(everybody, 0, "all-reduce") == pytest.approx(2 * (3 * 0.1 + 1))
    assert two.seconds(everybody, 20 * GB, "all-reduce") == pytest.approx(20 / 0.92 + 2 * (3 * 1 + 10))
    assert two.seconds(everybody, 1000 * GB, "all-reduce") == pytest.approx(1000 + 2 * (6 * 1 + 10))
    # There is no tree of gathered parts.
    assert two.seconds(everybody, 0) == 6 * 1 + 10


@pytest.mark.parametrize(("hosts", "most_ms"), [(32, 0.2), (384, 0.2), (1, 0.03)])
def test_a_number_is_added_up_over_thousands_of_gpus_in_a_fraction_of_a_millisecond(hosts, most_ms):
    net = Target.parse(f"h100:{hosts}x8").network()
    assert 0.01 < 1e3 * net.seconds([tuple(range(8 * hosts))], 16, "all-reduce") < most_ms


def test_a_domain_may_be_larger_than_a_host():
    rack = dataclasses.replace(NEAR, domain=8)
    net = network(4, 4, near=rack, far=FAR)
    assert list(net.levels(range(16))) == [Level(units=16, most=8, fewest=8, domains=2), Level(units=2, most=2, fewest=2, domains=1)]
    assert net.seconds([(0, 4)], GB) == 1, "the two hosts are in one rack"
    assert net.seconds([(0, 8)], GB) == 4


def test_a_rack_of_gb200_is_one_domain():
    chip = load_chip("gb200")
    net = Target(chip=chip, text="gb200:36x4", num_hosts=36, per_host=4).network([d // 4 for d in range(144)])
    inside, between = net.seconds([tuple(range(72))], GB), net.seconds([(0, 72)], GB)
    assert inside < 2 * GB / (chip.links["nvlink"].gbs * 1e9) < between
