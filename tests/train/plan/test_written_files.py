"""Files that a search writes are taken by the other commands as they are, and train what the run's own file trains."""

import random

import jax
import pytest
from plugin import needs_plugin

import jgt
from jgt.__main__ import main as jgt_main
from train.plan.answer import run_document, write_run
from train.plan.search.plans import PlanFigures, RunFile
from train.plan.search.search import PlannedLayout
from train.plan.search.space import OpenLayout, candidates

MODELS = {
    "gpt": "{kind: gpt, layers: 4, embed: 32, heads: 8, vocab: 256, seq: 32}",
    "llama": "{kind: llama, layers: 4, embed: 32, heads: 8, kv_heads: 8, ffn: 64, vocab: 256, seq: 32}",
    "moe": "{kind: llama, layers: 4, embed: 32, heads: 8, kv_heads: 8, ffn: 64, vocab: 256, seq: 32, experts: {count: 8, choose: 2}}",
}
SHORT = ["train.steps=1", "train.eval_every=0", "sample.tokens=0", "checkpoint.every=100"]
PLAN = PlanFigures(seconds=1.0, peak_bytes=10**9, fits=True)


def values_of(one):
    """The values that a written file has for a layout, each of which some layout has to show."""
    own = {("rules", one.rules), ("remat", one.remat), ("accumulate", one.accumulate > 1)}
    stages = one.stages
    return own if stages is None else own | {("schedule", stages.schedule), ("stage's remat", stages.remat), ("gather", stages.gather)}


def layouts(model, tmp_path):
    """A run's file, and layouts of a search of it that have every value together: every rules file, schedule, recompute and gathering."""
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {MODELS[model]}\ntrain: {{batch: 32, remat: auto, steps: 1}}\noptimizer: {{clip: 1.0}}\n")
    # Models have different combinations of the values.
    space = random.Random(model).sample(found := candidates(OpenLayout.read(RunFile(config=str(path))), 8), len(found))
    missing, chosen = set().union(*map(values_of, space)), []
    while missing:
        chosen.append(max(space, key=lambda one: len(values_of(one) & missing)))
        missing -= values_of(chosen[-1])
    return path, chosen


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("model", MODELS)
def test_a_written_file_is_checked_planned_and_trained(model, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path, found = layouts(model, tmp_path)
    # XLA's code generator is not under test.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        own = first_loss(path, "own")
        for number, one in enumerate(found[part::2]):
            written = tmp_path / f"best{number}.yaml"
            best = PlannedLayout(candidate=one, plan=PLAN, estimate=None)
            write_run(written, run_document(RunFile(config=str(path)), best, tmp_path), best, "h100:1x8")
            assert jgt_main(["check", str(written), "devices.virtual_cpu=8"]) == 0, capsys.readouterr().err
            assert jgt_main(["plan", str(written), "--target", "h100:1x8"]) == 0, capsys.readouterr().err
            assert first_loss(written, f"{number}") == pytest.approx(own, abs=2e-5), one
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def first_loss(path, name):
    result = jgt.run(str(path), [*SHORT, f"run.dir=runs/{name}"])
    return next(row["loss"] for row in result.metrics if "loss" in row)
