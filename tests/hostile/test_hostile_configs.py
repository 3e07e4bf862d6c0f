"""Hostile config files, overrides and schedule tables: each is refused with exit code 2 and one line per problem, and executes nothing."""

import dataclasses
import gzip
import pickle
import typing

import pytest
from hostile import argument, command, content, names, refused, table

from jgt.document import Node
from train.config import Config

# Each line has three times as many values as the line before: expanded, the last has 2 * 3^25.
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrstuvwxy", "bcdefghijklmnopqrstuvwxyz", strict=True)
)
CONFIGS = table("configs") | {
    "a billion laughs": {"text": LAUGHS, "message": "the anchor &a is not allowed"},
    "a pickle": {"bytes": pickle.dumps({"a": print}), "message": "not UTF-8"},
    "gzip": {"bytes": gzip.compress(b"train: {}"), "message": "not UTF-8"},
}
OVERRIDES = table("overrides") | {
    "a billion laughs": ["train=" + LAUGHS],
    "a thousand": [f"key{i}=1" for i in range(1_000)],
}
LIMITS = table("limits")
SCHEDULES = table("schedule_tables")


@pytest.mark.parametrize("name", names(CONFIGS))
def test_a_hostile_config_is_refused(folder, name):
    (folder / "hostile.yaml").write_bytes(content(CONFIGS[name]))
    problems = refused(folder, "--config", "hostile.yaml", "--print-config")
    assert any(CONFIGS[name]["message"] in problem for problem in problems), problems[:3]
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_hostile_override_is_refused(folder, name):
    (folder / "hostile.yaml").write_text("train: {steps: 3}")
    problems = refused(folder, "--config", "hostile.yaml", "--print-config", *map(argument, OVERRIDES[name]))
    assert all(problem.startswith("command line: ") for problem in problems), problems[:3]


@pytest.mark.parametrize("name", names(SCHEDULES))
def test_a_hostile_schedule_table_is_refused(empty, name):
    (empty / "table.csv").write_bytes(content(SCHEDULES[name]))
    (empty / "run.yaml").write_text("mesh: {stage: 2}\nrules: {}\npipeline: {signal: layers, microbatches: 2, schedule: table.csv}")
    problems = refused(empty, "--config", "run.yaml", "--print-config")
    assert any(SCHEDULES[name]["message"] in problem for problem in problems), problems[:3]


@pytest.mark.parametrize("key", LIMITS)
def test_every_number_has_a_limit(folder, key):
    (folder / "hostile.yaml").write_text("pipeline: {signal: layers, microbatches: 1}")
    for value in (10**18 if LIMITS[key] < 10**18 else 1e31, "9" * 299, "1e308", "-2", "-1e308", ".nan"):
        problems = refused(folder, "--config", "hostile.yaml", f"{key}={value}", "--print-config")
        assert any(f": {key}: " in problem for problem in problems), (value, problems)
    assert not any("is too large" in line for line in command("--config", "hostile.yaml", f"{key}={LIMITS[key]}", "--print-config")[2])


def test_the_table_of_limits_has_every_number_of_a_config():
    def numbers(cls, prefix):
        written = {field.name for field in dataclasses.fields(cls) if field.init}
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            if name not in written:
                continue
            options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is not typing.Annotated else [hint]
            for option in options:
                # A Node is a part of the document that another room reads.
                if dataclasses.is_dataclass(option) and option is not Node:
                    yield from numbers(option, f"{prefix}{name}.")
                elif (typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option) in (int, float):
                    yield f"{prefix}{name}"

    # An item of a list has no key to override. The hostile configs try the limits of these.
    in_model = {f"model.{name}" for name in ("rope_scaling.short", "rope_scaling.long", "unrotated_layers", "full_layers")}
    listed = in_model | {"data.mixture.weight", "debug.faults.at_step", "debug.faults.process", "pipeline.layers", "pipeline.stage_costs"}
    # The names of axes and of hooks are the user's.
    named = {"mesh.data", "hooks.it.every"}
    assert set(numbers(Config, "")) - listed - {"hooks.every"} | named == set(LIMITS)


def test_more_devices_than_a_run_can_start_are_refused(folder):
    problems = refused(folder, "--config", "base.yaml", "xla.cache=null", "devices.virtual_cpu=1000000")
    assert problems == [
        "command line: devices.virtual_cpu=1000000: devices.virtual_cpu: 1,000,000 is too large. "
        "A run starts at most 1,024; jgt check and jgt plan accept any number"
    ]
