"""jgt compared with its alternatives, side by side in one call.

    python benchmarks/peers.py [spectrax|levanter|maxtext|huggingface ...] [--maxtext PYTHON] [--levanter PYTHON] [--json] [--save]

    spectrax     gradients of a pipeline, 4 stages x fsdp 2, 8 microbatches, one layer per stage: all schedules of both that allow this
    maxtext      launch to first step, and a training step, on data 2 x fsdp 2 x tensor 2; --maxtext names a Python that has MaxText
    levanter     the same on fsdp 8; if this Python is older than 3.12, --levanter names a newer one
    huggingface  tokens/s of a 1.3B llama under torch.compile on one GPU; needs an NVIDIA GPU

Each peer except MaxText runs in an environment that is made on first use, with pinned versions. The model is that of step.yaml on 8 virtual
CPU devices (huggingface: peers/gpu.yaml). Processes of jgt and of the peer take turns; each ratio is jgt to the peer in the same round.
Without names, it compares huggingface if there is a GPU, otherwise spectrax, and also maxtext if --maxtext is given.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.environments import default_folder, python_with
from benchmarks.harness import (
    ROOT,
    FailedError,
    Sample,
    bar,
    compared,
    figures,
    find_device,
    make_parser,
    ratios,
    report,
    run_process,
    spread,
    turns,
)
from train.config import load

PROGRAMS = ROOT / "benchmarks" / "peers"
CONFIG = ROOT / "benchmarks" / "step.yaml"
SPECTRAX = ("spectrax-lib==0.1.4", "jax==0.10.2", "jaxlib==0.10.2")
"""With the oldest JAX that jgt supports, because this release cannot be imported with JAX 0.12."""
LEVANTER = PROGRAMS / "levanter.txt"
LEVANTER_PYTHON = (3, 12)
"""The oldest Python that Levanter supports."""
HUGGINGFACE = ("torch==2.9.1", "transformers==4.57.1")
BATCHES = (2, 4, 8, 16, 32, 64)
"""Batches to try on a GPU, in sequences."""
PIPELINES = {"jgt": ("1f1b", "gpipe", "zb", "1f1b, kept", "zb, kept"), "spectrax": ("Std1F1B", "Eager1F1B", "GPipe", "ZeroBubbleH1")}
"""The schedules with one chunk of layers per stage; 4 layers on 4 stages do not allow more.

Both sides recompute each layer: SpectraX always, jgt unless the name ends with `kept`.
"""
NO_STAGES = "no stages"
"""Not a schedule: the same work by jgt on the same devices without a pipeline, as a lower limit for the schedules."""
PIPELINE_BAR, MAXTEXT_FIRST_BAR, MAXTEXT_STEP_BAR = 0.55, 0.35, 0.85
"""The largest ratios that jgt aims for: to SpectraX's best schedule, to MaxText's launch and to its step."""
_LOSS_DIGITS = 1e-5

Found = dict[str, Any]


def main() -> None:
    """Runs the comparisons and prints their figures."""
    parser = make_parser(__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"one or more of {', '.join(PEERS)}")
    parser.add_argument("--maxtext", metavar="PYTHON", help="a Python interpreter with MaxText installed")
    parser.add_argument("--levanter", metavar="PYTHON", help="a Python interpreter, 3.12 or newer, for Levanter's environment")
    parser.add_argument("--environments", type=Path, default=default_folder(), metavar="DIR", help="the folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=3, help="number of processes of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each process")
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - PEERS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no peer has this name. Known peers: {', '.join(PEERS)}")
    if "maxtext" in arguments.peers and not arguments.maxtext:
        parser.error("maxtext: needs a Python interpreter with MaxText installed. Name one: --maxtext PYTHON")
    if "levanter" in arguments.peers and not arguments.levanter and sys.version_info < LEVANTER_PYTHON:
        parser.error("levanter: needs Python {}.{} or newer; name one: --levanter PYTHON".format(*LEVANTER_PYTHON))
    if "huggingface" in arguments.peers and find_device()["kind"] == "cpu":
        parser.error("huggingface: needs an NVIDIA GPU, and this machine has none. Leave it out")
    try:
        found = {name: compare(arguments) for name, compare in PEERS.items() if name in (arguments.peers or possible(arguments))}
    except FailedError as error:
        sys.exit(str(error))
    report("-".join(["peers", *found]), found, arguments)


def possible(arguments: argparse.Namespace) -> list[str]:
    """The peers to compare by default: those that are known to run on this machine."""
    if find_device()["kind"] != "cpu":
        return ["huggingface"]
    return ["spectrax", "maxtext"] if arguments.maxtext else ["spectrax"]


def sizes(arguments: argparse.Namespace, **more: Any) -> Found:
    """The sizes that the peers' programs take as JSON: model, batch and devices of step.yaml, the number of steps, and `more`."""
    config = load(str(CONFIG)).config
    return model_of(CONFIG) | {"batch": config.train.batch, "devices": config.devices.virtual_cpu, "steps": arguments.steps} | more


def model_of(path: Path) -> Found:
    """The sizes of the model in a config."""
    model = load(str(path)).config.model
    names = ("layers", "embed", "heads", "vocab", "seq")
    return {name: getattr(model, name) for name in names} | {"kv_heads": model.num_kv_heads, "ffn": model.ffn_size}


def in_turn(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[Found]]:
    """Runs the programs in turn, each in a fresh process with its launch time in LAUNCHED. Returns the JSON that they print."""
    found: dict[str, list[Found]] = {name: [] for name in commands}
    for name, _ in turns(list(commands), rounds, warmup=0):
        found[name].append(run_process(commands[name], {"LAUNCHED": str(time.time())}).found)
    return found


def alike(found: Mapping[str, Sequence[Found]], commands: Mapping[str, Sequence[str]]) -> Found:
    """Parameters, versions and commands of a comparison. Raises FailedError if the models have different numbers of parameters."""
    parameters = {name: of[0]["parameters"] for name, of in found.items()}
    if len(set(parameters.values())) > 1:
        raise FailedError(f"the models differ, parameters: {parameters}")
    versions = {name: of[0]["versions"] for name, of in found.items()}
    return {
        "parameters": parameters["jgt"],
        "versions": versions,
        "commands": {name: shlex.join(command) for name, command in commands.items()},
    }


def spectrax(arguments: argparse.Namespace) -> Found:
    """Compares the pipeline schedules of jgt and SpectraX."""
    python = {"jgt": sys.executable, "spectrax": str(python_with(SPECTRAX, arguments.environments, "spectrax"))}
    named = PIPELINES | {"jgt": (*PIPELINES["jgt"], NO_STAGES)}
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            side: [python[side], str(PROGRAMS / f"{side}_pipeline.py"), json.dumps(of), str(Path(folder) / "weights.npz")]
            for side, names in named.items()
            for of in [sizes(arguments, microbatches=8, mesh={"fsdp": 2, "stage": 4}, schedules=names)]
        }
        run_process(commands["jgt"])
        found = in_turn(commands, arguments.rounds)
    results = [of["schedules"][name] for side in found for of in found[side] for name in named[side]]
    for key, allowed in (("loss", _LOSS_DIGITS), ("grad_norm", 10 * _LOSS_DIGITS)):
        values = [of[key] for of in results]
        if max(values) - min(values) > allowed * max(values):
            raise FailedError(f"the programs differ, {key}: {min(values)} to {max(values)}")
    samples = {side: {name: [_step(of["schedules"][name]) for of in found[side]] for name in named[side]} for side in found}
    best = {side: min(names, key=lambda name: statistics.median(s.cpu_s for s in samples[side][name])) for side, names in PIPELINES.items()}
    ours, peer = samples["jgt"][best["jgt"]], samples["spectrax"]
    against = {name: ratios(ours, peer[name]) for name in dict.fromkeys((best["spectrax"], "Std1F1B"))}
    return {
        **{f"{side} {name}": figures(of) for side in samples for name, of in samples[side].items()},
        "best": best,
        **{f"{best['jgt']} to {name}": of for name, of in against.items()},
        f"{NO_STAGES} to {best['spectrax']}": ratios(samples["jgt"][NO_STAGES], peer[best["spectrax"]]),
        "bars": {
            f"to the best, {kind}": bar(against[best["spectrax"]][f"{kind}_ratio"]["median"], PIPELINE_BAR) for kind in ("s", "cpu_s")
        },
        "loss": results[0]["loss"],
        **alike(found, commands),
    }


def maxtext(arguments: argparse.Namespace) -> Found:
    """Compares jgt's trainer with MaxText's."""
    found = training(arguments, "maxtext", arguments.maxtext, {"data": 2, "fsdp": 2, "tensor": 2}, str(CONFIG))
    first, step = (found[key]["cpu_s_ratio"]["median"] for key in ("launch_to_first_step", "step"))
    return found | {"bars": {"first step, cpu_s": bar(first, MAXTEXT_FIRST_BAR), "step, cpu_s": bar(step, MAXTEXT_STEP_BAR)}}


def levanter(arguments: argparse.Namespace) -> Found:
    """Compares jgt's trainer with Levanter's; weights and batch are sharded over all devices."""
    requirements = LEVANTER.read_text().splitlines()
    python = str(python_with(requirements, arguments.environments, "levanter", arguments.levanter or sys.executable))
    overrides = ("rules=../configs/rules/fsdp.yaml", "mesh={fsdp: -1}")
    return training(arguments, "levanter", python, {"fsdp": 8}, str(CONFIG), *overrides)


def huggingface(arguments: argparse.Namespace) -> Found:
    """Compares tokens/s on one GPU, each side with its fastest batch. jgt runs a new process for each batch."""
    config = PROGRAMS / "gpu.yaml"
    peer = [str(python_with(HUGGINGFACE, arguments.environments, "huggingface")), str(PROGRAMS / "huggingface.py")]
    peer += [json.dumps(model_of(config) | {"batches": BATCHES, "steps": arguments.steps})]
    rounds: dict[str, list[Found]] = {"jgt": [], "huggingface": []}
    for side, _ in turns(list(rounds), arguments.rounds, warmup=0):
        rounds[side].append(run_process(peer).found if side == "huggingface" else _fastest(config, arguments.steps))
    speeds = {side: [of["tokens_per_s"] for of in found] for side, found in rounds.items()}
    found = {f"{side}_tokens_per_s": spread(of) for side, of in speeds.items()}
    found["ratio"] = spread(a / b for a, b in zip(*speeds.values(), strict=True))
    return found | {
        "batch": {side: of[0]["batch"] for side, of in rounds.items()},
        **alike(rounds, {"jgt": rounds["jgt"][0]["command"], "huggingface": peer}),
    }


def _fastest(config: Path, num_steps: int) -> Found:
    """jgt's result with the batch that gives the most tokens/s. Batches grow until one does not fit."""
    tried: list[Found] = []
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                str(PROGRAMS / "jgt_train.py"),
                "--config",
                str(config),
                f"run.dir={folder}/run",
                f"train.batch={batch}",
            ]
            try:
                found = run_process([*command, f"train.steps={num_steps + 3}"], {"LAUNCHED": str(time.time())}).found
            except FailedError as error:
                if not tried or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                break
        seconds = found["s"][2:]
        tried.append(found | {"batch": batch, "command": command, "tokens_per_s": found["tokens_a_step"] * len(seconds) / sum(seconds)})
    return max(tried, key=lambda of: of["tokens_per_s"])


def training(arguments: argparse.Namespace, peer: str, python: str, mesh: Mapping[str, int], config: str, *overrides: str) -> Found:
    """Compares launch and steps of `python -m train` with those of a peer's trainer, both without a compile cache."""
    steps = arguments.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        ours = ["--config", config, "--resume", "never", "xla.cache=null", f"train.steps={steps}", f"run.dir={folder}/run", *overrides]
        commands = {
            "jgt": [sys.executable, str(PROGRAMS / "jgt_train.py"), *ours],
            peer: [
                python,
                str(PROGRAMS / f"{peer}_train.py"),
                json.dumps(sizes(arguments, mesh=mesh) | {"steps": steps}),
                f"{folder}/{peer}",
            ],
        }
        found = in_turn(commands, arguments.rounds)
    return {
        "launch_to_first_step": compared({side: [Sample(**of["first"]) for of in found[side]] for side in found}),
        "step": compared({side: [_step(of) for of in found[side]] for side in found}),
        "settings": found[peer][0]["settings"],
        **alike(found, commands),
    }


def _step(found: Found) -> Sample:
    """A step of a process: the medians of its seconds and CPU-seconds."""
    return Sample(**{kind: statistics.median([found[kind]] if isinstance(found[kind], float) else found[kind]) for kind in ("s", "cpu_s")})


PEERS = {"spectrax": spectrax, "levanter": levanter, "maxtext": maxtext, "huggingface": huggingface}

if __name__ == "__main__":
    main()
