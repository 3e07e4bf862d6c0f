"""A mixture of experts, compared with a dense MLP of equal FLOPs for each token and with MaxText's, and its balance from a bad start.

    python benchmarks/experts.py [step|maxtext|learning|balance ...] [--steps N] [--maxtext PYTHON] [--json] [--save]

    step      a training step of configs/moe.yaml and of the same model with a dense MLP, on the same mesh. The dense MLP is split over the
              axis of the experts as in ZeRO-3. Everything else is replicated on both sides
    maxtext   a training step of jgt and of MaxText with each of its programs for experts that runs on CPUs, with the sizes of step.yaml
    learning  the loss on held-out text after 300 steps (--steps), one run of each for each seed
    balance   the load of the fullest expert and the held-out loss in 200 steps (--steps), if the router begins with all tokens at two of
              eight experts; with a bias and without balancing, one run of each for each seed

Without names, all run, maxtext if --maxtext names a Python that has it. Programs that are compared run in processes that take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, Sample, bar, compared, figures, make_parser, ratios, report, run_process, turns
from benchmarks.peers import CONFIG, PROGRAMS, alike, in_turn, sizes

MOE, DENSE = str(ROOT / "configs/moe.yaml"), str(ROOT / "configs/quickstart.yaml")
RULES = """axes: {batch: [data, expert]}
inputs: {"batch/*": [batch, null]}
signals:
  layers/mlp:
    params: {"*/kernel": [expert, null]}
    out: [batch, null, null]
default: replicate
"""
"""The dense MLP split over the devices that share the experts, gathered for each layer."""
STEP_BAR, LOAD_BAR, LOSS_BAR = 1.6, 1.3, 0.01
MAXTEXT_BAR = 1.0
EXPERTS = 8, 2, 512
"""Experts, choices of a token, and the width of an expert."""
FORMS = {
    "all experts for all rows": {"sparse_matmul": False, "capacity_factor": -1.0},
    "with drops, capacity 1.25": {"sparse_matmul": False, "capacity_factor": 1.25},
}
"""MaxText's programs for experts on an axis of experts, by its settings. The third, its default, needs ragged_all_to_all and so a GPU."""
QUIET = ("log=[jsonl]", "sample.tokens=0", "xla.cache=null")

Found = dict[str, Any]


def main() -> None:
    """Runs the measurements and prints their figures."""
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="|".join(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--steps", type=int, help="training steps; step: 10, learning: 300, balance: 200")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--maxtext", metavar="PYTHON", help="a Python interpreter with MaxText installed")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(MEASUREMENTS)):
        parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(MEASUREMENTS)}")
    if "maxtext" in arguments.names and not arguments.maxtext:
        parser.error("maxtext: needs a Python interpreter with MaxText installed. Name one: --maxtext PYTHON")
    names = arguments.names or [name for name in MEASUREMENTS if name != "maxtext" or arguments.maxtext]
    try:
        report("experts", {name: MEASUREMENTS[name](arguments) for name in names}, arguments)
    except FailedError as error:
        sys.exit(str(error))


def step(arguments: argparse.Namespace) -> Found:
    """The times of a step of both models."""
    samples: dict[str, list[Sample]] = {"experts": [], "dense": []}
    with tempfile.TemporaryDirectory() as folder:
        (rules := Path(folder, "dense.yaml")).write_text(RULES)
        own = {"experts": [MOE], "dense": [DENSE, f"rules={rules}", "mesh={data: 2, fsdp: 1, tensor: 1, expert: 4}"]}
        for side, _ in turns(list(own), arguments.rounds, warmup=0):
            command = [sys.executable, "benchmarks/peers/jgt_train.py", "--resume", "never", "--config", *own[side], *QUIET]
            command += [f"train.steps={arguments.steps or 10}", f"run.dir={folder}/{side}", "train.eval_every=0"]
            found = run_process(command, {"LAUNCHED": str(time.time())}).found
            samples[side].append(Sample(s=statistics.median(found["s"]), cpu_s=statistics.median(found["cpu_s"])))
    found = compared(samples)
    return found | {"bars": {f"step, {kind}": bar(found[f"{kind}_ratio"]["median"], STEP_BAR) for kind in ("s", "cpu_s")}}


def maxtext(arguments: argparse.Namespace) -> Found:
    """The times of a step of jgt and of MaxText's programs."""
    count, choose, ffn = EXPERTS
    model = f"model.experts={{count: {count}, choose: {choose}, ffn: {ffn}, balance: none}}"
    with tempfile.TemporaryDirectory() as folder:
        ours = ["--resume", "never", "xla.cache=null", f"train.steps={(arguments.steps or 5) + 1}", f"run.dir={folder}/run", model]
        ours += ["rules=../configs/rules/experts.yaml", "mesh={data: 2, fsdp: 1, tensor: 1, expert: 4}", "train.remat=block"]
        commands = {"jgt": [sys.executable, str(PROGRAMS / "jgt_train.py"), "--config", str(CONFIG), *ours]}
        for name, form in FORMS.items():
            settings = {"decoder_block": "mixtral", "num_experts": count, "num_experts_per_tok": choose, "base_moe_mlp_dim": ffn} | form
            of = sizes(arguments, mesh={"data": 2, "expert": 4}, ffn=ffn) | {"steps": (arguments.steps or 5) + 1, "settings": settings}
            commands[name] = [arguments.maxtext, str(PROGRAMS / "maxtext_train.py"), json.dumps(of), f"{folder}/{name}"]
        runs = in_turn(commands, arguments.rounds)
    steps = {
        name: [Sample(**{kind: statistics.median(of[kind]) for kind in ("s", "cpu_s")}) for of in found] for name, found in runs.items()
    }
    found: Found = {name: figures(of) for name, of in steps.items()}
    for name in FORMS:
        found[f"jgt to {name}"] = ratios(steps["jgt"], steps[name])
        found.setdefault("bars", {})[f"step, {name}, cpu_s"] = bar(found[f"jgt to {name}"]["cpu_s_ratio"]["median"], MAXTEXT_BAR)
    return found | alike(runs, commands)


def learning(arguments: argparse.Namespace) -> Found:
    """The held-out losses of both models, by seed."""
    steps, losses = arguments.steps or 300, dict[str, list[float]]()
    for side, config in (("experts", [MOE]), ("dense", [DENSE, "rules=rules/fsdp.yaml", "mesh={data: 1, fsdp: 8, tensor: 1}"])):
        losses[side] = [_held_out(config, steps, seed) for seed in range(arguments.seeds)]
    return losses | {"experts are better by": [dense - moe for moe, dense in zip(losses["experts"], losses["dense"], strict=True)]}


def _held_out(config: list[str], steps: int, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "train", "--config", *config, *QUIET, f"train.steps={steps}", f"run.seed={seed}"]
        run_process([*command, f"train.eval_every={steps}", "checkpoint.every=0", f"run.dir={folder}/run"])
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return next(row["eval_loss"] for row in reversed(rows) if "eval_loss" in row)


def balance(arguments: argparse.Namespace) -> Found:
    """The load of the fullest expert, and the held-out losses, by seed. The bars are of their means."""
    program = [sys.executable, "-m", "benchmarks.measure_experts"]
    found: Found = {}
    for name in ("bias", "none"):
        runs = [run_process([*program, name, str(arguments.steps or 200), str(seed)]).found for seed in range(arguments.seeds)]
        found[name] = {key: [run[key] for run in runs] for key in runs[0]}
    mean = {name: {key: statistics.mean(values) for key, values in of.items()} for name, of in found.items()}
    bars = {
        "load_max": bar(mean["bias"]["load_max"], LOAD_BAR),
        "loss": bar(mean["bias"]["loss"] - mean["none"]["loss"], LOSS_BAR),
    }
    return found | {"bars": bars}


MEASUREMENTS = {"step": step, "maxtext": maxtext, "learning": learning, "balance": balance}

if __name__ == "__main__":
    main()
