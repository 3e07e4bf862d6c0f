"""Random changes to a run's own files: a run resumes from them or refuses to, and a damaged checkpoint is never taken for a whole one."""

import json
import shutil

from fuzzing import as_json, as_yaml, fuzz, mutated, spoiled
from hostile import read_or_refused, read_step, watched
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoint import manifest
from train.config import load
from train.records.records import Records
from train.run.directory.history import begin_folder
from train.run.directory.identity import Resume, check_data, check_folder


@fuzz(80)
@given(st.data())
def test_any_manifest_is_read_or_broken(steps, data):
    path = steps.path(7) / manifest.NAME
    whole = path.read_bytes()
    forged = mutated(json.loads(whole)).map(lambda values: as_json(manifest.sealed(values) if isinstance(values, dict) else values))
    path.write_bytes(data.draw(forged | spoiled(whole)))
    if not read_step(steps):
        found = manifest.read(steps.path(7))
        assert found.step == 7 and 0 <= found.samples < 2**62
        assert all(type(n) is int and n >= 0 for entry in found.arrays for n in entry.shape)
    path.write_bytes(whole)


STARTED = {"config.yaml": None, "data.json": {"source": "text", "files": 1, "train_tokens": 100}, "metrics.jsonl": {"step": 3, "loss": 1.5}}


@fuzz(50)
@given(st.sampled_from(sorted(STARTED)), st.data())
def test_any_run_directory_is_resumed_or_refused(folder, name, data):
    (folder / "run.yaml").write_bytes(as_yaml({"model": {"layers": 2}, "run": {"dir": "started"}}))
    run = load("run.yaml")
    shutil.rmtree("started", ignore_errors=True)
    begin_folder(run, STARTED["data.json"])
    if name == "config.yaml":
        text = data.draw(mutated(run.resolved()).map(as_yaml) | spoiled(as_yaml(run.resolved())))
    else:
        text = data.draw(mutated(STARTED[name]).map(as_json) | spoiled(as_json(STARTED[name])))
    (folder / "started" / name).write_bytes(text)
    read_or_refused(folder, check_folder, run, Resume())
    read_or_refused(folder, check_data, run, STARTED["data.json"], Resume())
    records = Records(folder / "started")
    with watched(folder):
        records.forget_after(2)
