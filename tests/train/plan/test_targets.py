"""Several targets: which is the best offer for a job, and what a command line may ask for."""

import argparse
import math

import pytest

from jgt.document import InputError
from jgt.planner.hardware.target import Target
from train.plan.__main__ import main
from train.plan.offers import Job, Offer, is_choice, parse_tokens, print_offers, ranked, read_job, read_targets
from train.plan.search.layout import Candidate, Roles
from train.plan.search.plans import PlanFigures
from train.plan.search.search import PlannedLayout
from train.plan.searching import search_targets

FSDP = Roles(batch=("fsdp",), weights=("fsdp",))
LAYOUT = Candidate(mesh=(("fsdp", 8),), rules="jgt:fsdp", roles=FSDP, accumulate=1, rows=1, remat="block")
TOKENS = 1_000_000
"""In a step."""


class Found:
    """A search that has found a step of so many seconds, or nothing."""

    def __init__(self, seconds, *, interrupted=False):
        plan = PlanFigures(seconds=seconds or 0.0, peak_bytes=50_000_000_000, fits=True)
        self.best = PlannedLayout(candidate=LAYOUT, plan=plan, estimate=None) if seconds else None
        self.is_interrupted = interrupted

    def run(self):
        pass


def offer(target, seconds, job):
    return Offer(job=job, target=Target.parse(target), best=Found(seconds).best, problem="nothing fits")


def arguments(**values):
    given = {**dict.fromkeys(("target", "targets", "price", "tokens", "deadline", "chip")), "set": [], **values}
    return argparse.Namespace(**given)


def targets(text):
    return read_targets(arguments(targets=text))


def test_the_cost_and_the_days_of_a_job():
    job = Job(batch_tokens=TOKENS, tokens=8.64e12, days=50, prices={"h100": 2.0})
    found = offer("h100:8x8", 1.0, job)
    # 10^6 tokens/s for 10^2 days, on 64 GPUs at 2 dollars an hour.
    assert found.tokens_per_s == TOKENS
    assert found.days == pytest.approx(100)
    assert found.per_hour == 128
    assert found.cost == pytest.approx(128 * 24 * 100)
    assert found.per_million == pytest.approx(128 / 3600)
    # Twice as fast takes twice as many hosts.
    assert found.needed == 128
    assert not found.is_in_time


def test_the_cheapest_in_time_is_first_and_what_does_not_fit_last():
    prices = {"h100": 2.0, "h200": 3.0, "b200": 9.0}
    job = Job(batch_tokens=TOKENS, tokens=8.64e11, days=8, prices=prices)
    late, fast, dear, none = (offer(t, s, job) for t, s in (("h100:1x8", 1.0), ("h200:1x8", 0.7), ("b200:1x8", 0.5), ("h100:2x8", None)))
    assert [one for one, _ in ranked([(one, None) for one in (none, late, dear, fast)])] == [fast, dear, late, none]
    assert none.problem == "nothing fits"


def test_without_prices_the_fastest_is_first():
    job = Job(batch_tokens=TOKENS)
    slow, fast = offer("h100:1x8", 2.0, job), offer("h200:1x8", 1.0, job)
    assert [one for one, _ in ranked([(slow, None), (fast, None)])] == [fast, slow]
    assert fast.days is fast.cost is fast.needed is None


def test_the_table_has_what_was_asked_for(capsys):
    job = Job(batch_tokens=TOKENS, tokens=8.64e12, days=10, prices={"h100": 2.0})
    print_offers([offer("h100:8x8", 1.0, job), offer("h100:1x8", None, job)])
    text = capsys.readouterr().out
    assert "$/M tokens" in text
    assert "too late" in text
    assert "GPUs for 10 days" in text
    assert "nothing fits" in text


def test_ctrl_c_ends_the_search_on_all_targets():
    job, begun = Job(batch_tokens=TOKENS), []

    def begin(target):
        begun.append(target.text)
        return Found(1.0, interrupted=True)

    found = search_targets(targets("h100:1x8,h200:1x8"), job, begin)
    assert begun == ["h100:1x8"]
    assert [offer.problem for offer, _ in found] == ["", "not reached"]


def test_a_target_without_a_layout_does_not_end_the_others():
    def begin(target):
        if target.num_hosts == 1:
            raise InputError(["no layout uses 8 devices"])
        return Found(1.0)

    found = search_targets(targets("h100:1x8,h100:2x8"), Job(batch_tokens=TOKENS), begin)
    assert [(offer.target.text, offer.problem) for offer, _ in found] == [("h100:2x8", ""), ("h100:1x8", "no layout uses 8 devices")]


@pytest.mark.parametrize(("text", "number"), [("15T", 15e12), ("300B", 3e11), ("2.5e9", 2.5e9), ("7", 7)])
def test_numbers_of_tokens(text, number):
    assert math.isclose(parse_tokens(text), number)


@pytest.mark.parametrize("text", ["", "many", "-3B", "0", "1e999", "3b"])
def test_what_is_not_a_number_of_tokens(text):
    with pytest.raises(InputError, match="--tokens"):
        parse_tokens(text)


def test_every_problem_of_a_command_line_is_reported(tmp_path, capsys):
    prices, run = tmp_path / "prices.yaml", tmp_path / "run.yaml"
    prices.write_text("h100: cheap\nh10: 2\n")
    run.write_text("train: {batchh: 7}\n")
    options = ["--targets", "h100:1x8,h200:1x8,h200:1x8", "--price", str(prices), "--deadline=-1", "--lock", "plan.lock"]
    assert main([str(run), "--search", *options]) == 2
    text = capsys.readouterr().err
    assert "--lock cannot be combined with --search" in text
    assert "unknown key" in text
    assert "h200:1x8 is there twice" in text
    assert "--deadline needs --tokens" in text
    assert "must be a number of days above 0, not -1" in text
    assert f"{prices}:1" in text
    assert f"{prices}:2" in text
    assert "Did you mean" in text or "h100" in text


def test_a_chip_without_a_price_is_named(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100: 2.5\n")
    with pytest.raises(InputError, match="the price of h200 is missing"):
        read_job(arguments(price=str(prices)), targets("h100:1x8,h200:1x8"))
    job = read_job(arguments(price=str(prices), tokens="1T", deadline=3.0), [Target.parse("h100:1x8")])
    assert job == Job(tokens=1e12, days=3.0, prices={"h100": 2.5})


@pytest.mark.parametrize("given", [{}, {"target": "h100:1x8", "targets": "h200:1x8"}])
def test_a_target_is_needed_once(given):
    with pytest.raises(InputError, match="--target"):
        read_targets(arguments(**given))


def test_a_plain_search_is_not_a_choice():
    assert not is_choice(arguments(target="h100:1x8"))
    assert is_choice(arguments(target="h100:1x8", tokens="1T"))


def test_options_of_a_search_are_refused_without_one(capsys):
    assert main(["configs/llama-8b.yaml", "--target", "h100:1x8", "--deadline", "3", "--write", "best.yaml"]) == 2
    text = capsys.readouterr().err
    assert "--deadline needs --search" in text
    assert "--write needs --search" in text


@pytest.mark.parametrize("option", ["--top=0", "--top=many", "--time=-1", "--time=nan"])
def test_numbers_of_a_search_that_cannot_be(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run.yaml", "--search", option])
    assert ended.value.code == 2
    assert f"command line: {option.partition('=')[0]}: must be a" in capsys.readouterr().err
