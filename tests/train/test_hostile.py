"""Input as an enemy: whatever a file, a folder or a command line holds, one line a problem and exit code 2, soon and without harm."""

import contextlib
import copy
import dataclasses
import gzip
import io
import json
import os
import pickle
import shutil
import socket
import struct
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hostile import TEXTS, assert_lines, fuzz, mutated, spoiled, values, watched
from hypothesis import given
from hypothesis import strategies as st

from jgt import document
from jgt.document import InputError
from jgt.pipeline.custom import read_table
from jgt.rules import load_rules
from train import manifest
from train.__main__ import main
from train.checkpoint import Checkpoints, find_in
from train.config import Config, load
from train.data import DataConfig, open_data
from train.folder import Resume, check_data, check_folder, write_folder
from train.manifest import ArrayEntry, BrokenError, Manifest
from train.records import Records
from train.sections import CheckpointConfig
from train.step import State
from train.steps import Steps

RULES = {
    "axes": {"batch": ["data"], "vocab": ["stage", "tensor"]},
    "params": {"{embedding,unembedding}": [["vocab", "data"], None]},
    "optimizer": {"*/kernel": [["data"], "tensor"]},
    "signals": {
        "layers/attn": {
            "params": {"*_proj/kernel": ["data", "tensor"], "out/kernel": ["tensor", "data"]},
            "tensors": {"heads": ["batch", None, "tensor", None]},
            "out": ["batch", None, None],
            "backward": {"out": ["batch", "tensor", None], "tensors": {"heads": ["batch", "..."]}},
            "save": {"heads": "recompute"},
        },
        "**": {"out": ["batch", "..."]},
    },
    "default": "replicate",
}
RUN = {
    "run": {"name": "hostile", "dir": None, "seed": 1},
    "model": {"kind": "llama", "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": 256, "seq": 32, "rope_theta": 1e4},
    "devices": {"virtual_cpu": 8},
    "mesh": {"data": 2, "stage": 2, "tensor": 2},
    "rules": RULES,
    "pipeline": {"signal": "layers", "microbatches": 4, "schedule": "interleaved", "virtual": 2, "per_microbatch": ["router"]},
    "data": {"source": "mixture", "eval_tokens": 10, "mixture": [{"source": "text", "path": "a.txt", "weight": 1}, {"source": "tokens", "path": "*.bin", "weight": 2.5}]},
    "optimizer": {"lr": 3e-3, "schedule": "wsd", "warmup": 2, "clip": None},
    "train": {"steps": 20, "batch": 16, "accumulate": 2, "remat": ["heads"]},
    "checkpoint": {"every": 5, "keep": 2},
    "sample": {"tokens": 5, "prompt": "a", "temperature": 0.5},
    "budget": {"peak_gb": 70, "layers/attn": {"all-gather": 0}},
}
TABLE = "# stage 0,stage 1\nF0,-\nF1,F0 B0\nF2 B0,F1 B1\nB1,F2 B2\nB2,-\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the valid files name."""
    path = tmp_path_factory.mktemp("hostile")
    (path / "a.txt").write_text("some text " * 50)
    np.arange(200, dtype=np.uint16).tofile(path / "a.bin")
    (path / "table.csv").write_text(TABLE)
    (path / "rules.yaml").write_text(document.dump(RULES))
    (path / "base.yaml").write_text(document.dump({"train": {"steps": 3}}))
    return path


@pytest.fixture(autouse=True)
def _here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def command(*argv):
    """Exit code, stdout and the lines of stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    return code, out.getvalue(), err.getvalue().splitlines()


def refused(folder, *argv):
    """The problems of a command that must refuse its input."""
    with watched(folder):
        code, out, lines = command(*argv)
    assert (code, out) == (2, "")
    assert_lines(lines)
    return lines


def read_or_refused(folder, call, *arguments):
    """Calls a loader, which must return or name its problems."""
    with watched(folder):
        try:
            return call(*arguments)
        except InputError as error:
            problems = error.problems
    assert_lines(problems)
    return None


# -- configs -----------------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x]\n" + "".join(f"{chr(97 + i)}: &{chr(97 + i)} [*{chr(96 + i)}, *{chr(96 + i)}, *{chr(96 + i)}]\n" for i in range(1, 26))
CONFIGS = {
    "a tag that runs": ("train: !!python/object/apply:os.system [touch canary]", "the tag tag:yaml.org,2002:python/object/apply:os.system is not allowed"),
    "a tag that makes": ("train: !!python/object/new:os.mkdir [canary]", "is not allowed; write a plain value"),
    "a tag that imports": ("train: !!python/module:antigravity x", "is not allowed; write a plain value"),
    "a tag that names": ("train: !!python/name:os.system x", "is not allowed; write a plain value"),
    "a tag by directive": ("%TAG ! tag:yaml.org,2002:python/object/apply:\n---\ntrain: !os.mkdir [canary]", "is not allowed; write a plain value"),
    "a verbatim tag": ("train: !<tag:yaml.org,2002:python/object/apply:os.mkdir> [canary]", "is not allowed; write a plain value"),
    "a tag on a key": ("!!python/object/apply:os.mkdir [canary]: 1", ":1: "),
    "binary": ("run: {name: !!binary aGVsbG8=}", "the tag tag:yaml.org,2002:binary is not allowed"),
    "a set": ("train: !!set {a, b}", "the tag tag:yaml.org,2002:set is not allowed"),
    "a timestamp": ("train: {steps: 2024-01-01 10:00:00}", "train.steps: must be a whole number, not the text '2024-01-01 10:00:00'"),
    "an anchor": ("train: &a {steps: 1}", "the anchor &a is not allowed"),
    "an alias": ("train: *a", "the alias *a is not allowed"),
    "an alias of itself": ("train: &a [*a]", "the anchor &a is not allowed"),
    "a mapping that holds itself": ("&a x: *a", "tags and anchors are not allowed on keys"),
    "a billion laughs": (LAUGHS, "the anchor &a is not allowed"),
    "a merge key": ("train: {<<: {steps: 3}}", "the merge key << is not allowed"),
    "a merge of aliases": ("a: &a {b: 1}\ntrain:\n  <<: [*a, *a]", "the merge key << is not allowed"),
    "two documents": ("train: {steps: 1}\n---\ntrain: {steps: 2}", ":2: a second document starts here"),
    "ten thousand documents": ("---\n" * 10_000, "a second document starts here"),
    "a key twice": ("train: {steps: 1, steps: 2}", "this key is given twice"),
    "a key ten thousand times": ("a: 1\n" * 10_000, "this key is given twice"),
    "a section twice": ("train: {}\nmodel: {}\ntrain: {}", ":3: train: this key is given twice"),
    "a list as a key": ("? [a, b]\n: 1", "a key must be plain text"),
    "a mapping as a key": ("{{a: 1}: 2}", "a key must be plain text"),
    "a number as a key": ("train: {3: 4}", "train.3: unknown key"),
    "null as a key": ("~: 4", "~: unknown key"),
    "nothing as a key": ("'': 4", "file: unknown key"),
    "a line end in a key": ('"a\\nb": 1', "a\\nb: unknown key"),
    "colours in a key": ('"\\e[31mred": 1', "\\x1b[31mred: unknown key"),
    "letters from right to left in a key": ('"\\u202egnp": 1', "\\u202egnp: unknown key"),
    "a key that ends with a line end": ('train: {"steps\\n": 1}', "train.steps\\n: unknown key. Did you mean 'steps'?"),
    "a long key": ("x" * 500_000 + "\n: 1", ":1: "),
    "a long key in quotes": ('? "' + "x" * 500_000 + '"\n: [' + "1," * 3_000 + "]", "is longer than 1,000 characters"),
    "long keys in each other": ("{? " + "x" * 300 + ": " + "{? " + "y" * 300 + ": {? " + "z" * 500 + ": 1}}}", "is longer than 1,000 characters"),
    "open brackets": ("[" * 500_000, "nested deeper than 32 levels"),
    "open braces": ("{a: " * 200_000, "nested deeper than 32 levels"),
    "open brackets in a key": ("? " + "[" * 100_000, "a key must be plain text"),
    "brackets": ("a: " + "[" * 12_000 + "]" * 12_000, "nested deeper than 32 levels"),
    "dashes": ("- " * 400_000, "nested deeper than 32 levels"),
    "question marks": ("? " * 400_000, "a key must be plain text"),
    "33 levels": ("a: " + "[" * 33 + "]" * 33, "nested deeper than 32 levels"),
    "many values": ("train: {remat: [" + "a, " * 60_000 + "]}", "more than 10,000 keys and values"),
    "many empty lists": ("a: [" + "[], " * 200_000 + "]", "more than 10,000 keys and values"),
    "more than a megabyte": ("#" * 1_000_001, "the file is larger than 1,000,000 bytes"),
    "a long text": ("model: {kind: " + "x" * 900_000 + "}", "'... is not one of llama, gpt"),
    "a long number": ("model: {layers: " + "9" * 900_000 + "}", "model.layers: must be a whole number, not the text '9999"),
    "a long number that is none": ("model: {layers: " + "1" * 900_000 + "x}", "model.layers: must be a whole number, not the text '1111"),
    "a number with many dots": ("optimizer: {lr: " + "1." * 400_000 + "}", "optimizer.lr: must be a number, not the text"),
    "underscores": ("model: {layers: 1" + "_" * 900_000 + "}", "model.layers: must be a whole number"),
    "300 digits": (f"model: {{layers: {'9' * 300}}}", "is too large; it must be at most 10_000"),
    "300 digits for a float": (f"optimizer: {{lr: {'9' * 300}}}", "is too large; it must be at most 1e+30"),
    "300 digits in a budget": (f"budget: {{peak_gb: -{'9' * 299}}}", "budget.peak_gb: must be a number of at least 0"),
    "1e400": ("optimizer: {lr: 1e400}", "optimizer.lr: must be a finite number, not inf"),
    "-1e400": ("optimizer: {lr: -1e400}", "optimizer.lr: must be a finite number, not -inf"),
    "1e999999999999": ("optimizer: {lr: 1e999999999999}", "optimizer.lr: must be a finite number, not inf"),
    "infinity": ("optimizer: {clip: .inf}", "optimizer.clip: must be a finite number, not inf"),
    "not a number": ("optimizer: {eps: .nan}", "optimizer.eps: must be a finite number, not nan"),
    "not a number in a budget": ("budget: {peak_gb: .nan}", "budget.peak_gb: must be a number of at least 0, not the number nan"),
    "hexadecimal": ("model: {layers: 0x10}", "model.layers: must be a whole number, not the text '0x10'"),
    "sexagesimal": ("model: {layers: 1:30}", "model.layers: must be a whole number, not the text '1:30'"),
    "yes": ("model: {tied: yes}", "write true or false"),
    "other digits": ("model: {layers: \u0663}", "model.layers: must be a whole number, not the text"),
    "NUL": ("train: {steps: \0}", "not valid YAML"),
    "NUL by escape": ('run: {name: "a\\0b"}', "run.name: 'a\\x00b' cannot name a folder"),
    "half a surrogate pair": ('run: {name: "\\ud800"}', "not valid YAML"),
    "a character past Unicode": ('run: {name: "\\UFFFFFFFF"}', "not valid YAML"),
    "invalid UTF-8": (b"train: {steps: \xff\xfe}", "not UTF-8: byte 0xff at offset 15"),
    "UTF-8 of a surrogate": (b"a: \xed\xa0\x80", "not UTF-8: byte 0xed at offset 3"),
    "UTF-16": ("train: {steps: 3}".encode("utf-16"), "not UTF-8: byte 0xff at offset 0"),
    "UTF-16 without a mark": ("train: {steps: 3}".encode("utf-16-le"), "not valid YAML"),
    "UTF-32": ("train: {steps: 3}".encode("utf-32"), "not UTF-8: byte 0xff at offset 0"),
    "two byte order marks": ("\ufeff\ufefftrain: {steps: x}", "steps"),
    "a byte order mark inside": ("train: {\ufeffsteps: 3}", ":1: "),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8: byte 0x89 at offset 0"),
    "a pickle": (pickle.dumps({"a": print}), "not UTF-8"),
    "gzip": (gzip.compress(b"train: {}"), "not UTF-8"),
    "carriage returns": ("train:\r steps: x\r\n", "must be a whole number, not the text 'x'"),
    "a tab": ("train:\n\tsteps: 3", "not valid YAML"),
    "a quote that does not end": ("train: '" + "x\n" * 1_000, "not valid YAML"),
    "YAML 9": ("%YAML 9.9\n---\ntrain: {}", "not valid YAML"),
    "a version without end": (f"%YAML {'9' * 5_000}.1\n---\n", "not valid YAML"),
    "a list": ("- train", "the file must be a mapping of keys to values, not a list"),
    "a scalar": ("train", "the file must be a mapping of keys to values, not the text 'train'"),
    "a scalar for a section": ("train: 3", "train: must be a mapping"),
    "nested sections": ("train: {train: {train: {}}}", "train.train: unknown key"),
    "many unknown keys": ("".join(f"key{i}: 1\n" for i in range(4_000)), "and 3,000 more problems"),
    "many unknown keys that are long": ("".join(f"{'embed' * 15}{i}: 1\n" for i in range(4_000)), "unknown key"),
    "extends itself": ("extends: hostile.yaml", "the files extend each other in a circle"),
    "extends nothing": ("extends: ''", "extends: no such file"),
    "extends a folder": ("extends: .", "extends: no such file"),
    "extends a list": ("extends: [base.yaml]", "extends: must be the path of a file, not a list"),
    "extends a device": ("extends: /dev/zero", "extends: no such file: /dev/zero"),
    "extends what is not there": ("extends: /nowhere/at/all.yaml", "extends: no such file: /nowhere/at/all.yaml"),
    "extends a long name": (f"extends: {'a' * 5_000}", "extends: no such file"),
    "extends NUL": ('extends: "a\\0b"', "extends: no such file: a\\x00b"),
    "extends what is no YAML": ("extends: /bin/sh", "/bin/sh:1: not UTF-8"),
    "a mesh of nothing": ("mesh: {}", "a mesh is a mapping of axis names to sizes"),
    "a mesh of a text": ("mesh: data", "a mesh is a mapping of axis names to sizes"),
    "a mesh of many axes": ("mesh: {" + ", ".join(f"a{i}: 1" for i in range(100)) + "}", "has 100 axes; a mesh has at most 32"),
    "a mesh of many devices": ("mesh: {data: 1000, fsdp: 1000, tensor: 1000}", "the sizes multiply to 1,000,000,000; a mesh has at most 1,000,000 devices"),
    "an axis without a name": ("mesh: {'': 2}", "cannot name an axis"),
    "an axis with a line end": ('mesh: {"a\\nb": 2}', "mesh.a\\nb: cannot name an axis"),
    "an axis of half a device": ("mesh: {data: 0.5}", "an axis size is a whole number of at least 1"),
    "an axis that is true": ("mesh: {data: true}", "an axis size is a whole number of at least 1"),
    "rules of a number": ("rules: 3", "rules are the path of a file or a mapping"),
    "rules of a device": ("mesh: {data: 1}\nrules: /dev/zero", "no such rules file: /dev/zero"),
    "rules of a long name": (f"mesh: {{data: 1}}\nrules: {'a' * 5_000}", "no such rules file"),
    "rules of a long name with a colon": (f"mesh: {{data: 1}}\nrules: 'a:{'a' * 5_000}'", "no such rules file"),
    "rules of NUL": ('mesh: {data: 1}\nrules: "a\\0b"', "no such rules file: a\\x00b"),
    "rules of a NUL folder": ('mesh: {data: 1}\nrules: "a\\0b/c.yaml"', "no such rules file"),
    "rules that extend": ("mesh: {data: 1}\nrules: {extends: base.yaml}", "only a file can extend another"),
    "many axes in a group": ("mesh: {data: 1}\nrules: {axes: {g: [" + "a, " * 50 + "]}}", "has 50 axes; a mesh has at most 32"),
    "groups that grow": (
        "mesh: {data: 1}\nrules: {axes: {g: [" + ", ".join(f"a{i}" for i in range(32)) + "]}, inputs: {" + ", ".join(f"p{i}: [g]" for i in range(1_000)) + "}}",
        "the mesh has no axis 'a0'",
    ),
    "an axis many times": ("mesh: {data: 1}\nrules: {inputs: [" + "data, " * 5_000 + "]}", "the axis 'data' stands twice in one spec"),
    "a mapping for an action": ("mesh: {data: 1}\nrules: {signals: {a: {save: {b: {c: " + "[" * 20 + "]" * 20 + "}}}}}", "a mapping is not one of keep, recompute, offload"),
    "a long text for an action": (f"mesh: {{data: 1}}\nrules: {{signals: {{a: {{save: {{b: {'keep' * 9_000}}}}}}}}}", "'... is not one of keep, recompute, offload"),
    "a schedule of a device": ("mesh: {stage: 2}\nrules: {}\npipeline: {signal: a, microbatches: 2, schedule: /dev/zero}", "there is no schedule '/dev/zero'"),
    "a schedule of a long name": (f"mesh: {{stage: 2}}\nrules: {{}}\npipeline: {{signal: a, microbatches: 2, schedule: {'a' * 5_000}.csv}}", "there is no file '"),
    "a schedule without end": ("mesh: {stage: 1000}\nrules: {}\npipeline: {signal: a, microbatches: 60000}", "at most 1,000,000 are planned"),
    "chunks without end": ("mesh: {stage: 1000}\nrules: {}\npipeline: {signal: a, microbatches: 2, schedule: interleaved, virtual: 1000}", "at most 1,000,000 are planned"),
    "a mixture of many parts": ("data: {source: mixture, mixture: [" + "{weight: 1}, " * 2_000 + "]}", "has 2,000 parts; 1000 are the most"),
    "a weight without end": ("data: {source: mixture, mixture: [{weight: 1e308}, {weight: 1}]}", "mixture[0].weight: 1e+308 is too large"),
    "a fault after all time": (f"debug: {{faults: [{{at_step: {10**18}, kind: kill}}]}}", "debug.faults[0].at_step: 1000000000000000000 is too large"),
    "a fault of no process": (f"debug: {{faults: [{{at_step: 1, kind: kill, process: {10**18}}}]}}", "debug.faults[0].process: 1000000000000000000 is too large"),
    "a flag that writes": ("xla: {flags: {xla_dump_to: dumped}}", "xla.flags.xla_dump_to: names a place"),
    "a flag with a path": ("xla: {flags: {xla_gpu_enable: /etc}}", "xla.flags.xla_gpu_enable: is no flag of XLA"),
    "a flag that runs": ("xla: {flags: {xla_gpu_cuda_data_dir: evil}}", "xla.flags.xla_gpu_cuda_data_dir: names a place"),
    "a flag of flags": ("xla: {flags: {xla_backend_extra_options: 'xla_dump_to=a'}}", "is no flag of XLA"),
    "a flag of NUL": ('xla: {flags: {xla_a: "\\0"}}', "xla.flags.xla_a: is no flag of XLA"),
    "a flag of two": ('xla: {flags: {xla_a: "1 --xla_dump_to=a"}}', "xla.flags.xla_a: is no flag of XLA"),
    "a flag of two lines": ('xla: {flags: {"xla_a\\n": 1}}', "is no flag of XLA"),
    "a flag without end": (f"xla: {{flags: {{xla_a: {'9' * 290}}}}}", "xla.flags.xla_a: is no flag of XLA"),
    "a flag that is infinite": ("xla: {flags: {xla_a: .inf}}", "xla.flags.xla_a: must be"),
    "many flags": ("xla: {flags: {" + ", ".join(f"xla_{i}: 1" for i in range(100)) + "}}", "has 100 flags; 64 are the most"),
    "a cache of NUL": ('xla: {cache: "a\\0b"}', "xla.cache: 'a\\x00b' cannot be a path"),
    "no cache": ("xla: {cache: ''}", "xla.cache: '' cannot be a path"),
    "a batch that is not divided": ("train: {batch: 1000000, accumulate: 999999}", "batch 1000000 is not divisible by accumulate 999999"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config(folder, name):
    text, expected = CONFIGS[name]
    (folder / "hostile.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    problems = refused(folder, "--config", "hostile.yaml", "--print-config")
    assert any(expected in problem for problem in problems), problems[:3]
    assert not (folder / "canary").exists()


LIMITS = {
    "run.seed": 2**32 - 1,
    "model.layers": 10_000,
    "model.embed": 1_000_000,
    "model.heads": 10_000,
    "model.kv_heads": 10_000,
    "model.head_dim": 1_000_000,
    "model.ffn": 10_000_000,
    "model.vocab": 10_000_000,
    "model.seq": 10_000_000,
    "model.rope_theta": 1e30,
    "model.norm_eps": 1e30,
    "devices.virtual_cpu": 1_000_000,
    "mesh.data": 1_000_000,
    "pipeline.microbatches": 65_536,
    "pipeline.virtual": 1_024,
    "data.eval_tokens": 10**12,
    "optimizer.lr": 1e30,
    "optimizer.warmup": 10**9,
    "optimizer.decay": 1,
    "optimizer.final_lr": 1,
    "optimizer.b1": 1,
    "optimizer.momentum": 1,
    "optimizer.b2": 1,
    "optimizer.eps": 1e30,
    "optimizer.weight_decay": 1e30,
    "optimizer.clip": 1e30,
    "train.steps": 10**9,
    "train.batch": 1_000_000,
    "train.accumulate": 1_000_000,
    "train.log_every": 10**9,
    "train.eval_every": 10**9,
    "train.eval_batches": 10**9,
    "train.skip_spikes.window": 1_000_000,
    "train.skip_spikes.deviations": 1e30,
    "train.max_skipped": 10**9,
    "train.loss_chunks": 10**9,
    "checkpoint.every": 10**9,
    "checkpoint.keep": 10**9,
    "watchdog.step_seconds": 1_000_000,
    "watchdog.start_seconds": 1_000_000,
    "watchdog.peer_seconds": 1_000_000,
    "sample.tokens": 10**9,
    "sample.temperature": 1e30,
}


@pytest.mark.parametrize("key", LIMITS)
def test_every_number_has_a_limit(folder, key):
    (folder / "hostile.yaml").write_text("pipeline: {signal: layers, microbatches: 1}")
    for value in (10**18 if LIMITS[key] < 10**18 else 1e31, "9" * 299, "1e308", "-2", "-1e308", ".nan"):
        problems = refused(folder, "--config", "hostile.yaml", f"{key}={value}", "--print-config")
        assert any(f": {key}: " in problem for problem in problems), (value, problems)
    assert not any("is too large" in line for line in command("--config", "hostile.yaml", f"{key}={LIMITS[key]}", "--print-config")[2])


def test_every_number_is_among_them():
    def numbers(cls, prefix):
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is not typing.Annotated else [hint]
            for option in options:
                if dataclasses.is_dataclass(option):
                    yield from numbers(option, f"{prefix}{name}.")
                elif typing.get_origin(option) is typing.Annotated or option in (int, float):
                    yield f"{prefix}{name}"

    # A list has no key to override; these stand above.
    listed = {"data.mixture.weight", "debug.faults.at_step", "debug.faults.process"}
    assert set(numbers(Config, "")) - listed | {"mesh.data"} == set(LIMITS)


OVERRIDES = {
    "no value": ["train.steps"],
    "no key": ["=1"],
    "two dots": ["a..b=1"],
    "a dot": [".=1"],
    "a dot before": [".train=1"],
    "a key without end": [".".join("a" * 100_000) + "=1"],
    "a key of 33 levels": [".".join("a" * 33) + "=1"],
    "a long key": ["a" * 100_000 + "=1"],
    "a value without end": ["model.kind=" + "x" * 100_000],
    "a number without end": ["model.layers=" + "9" * 100_000],
    "1e999": ["model.layers=1e999"],
    "1e999 for a float": ["optimizer.lr=1e999"],
    "a tag": ["train.steps=!!python/object/apply:os.mkdir [canary]"],
    "an alias": ["train.steps=*a"],
    "an anchor": ["train.steps=&a 3"],
    "laughs": ["train=" + LAUGHS],
    "brackets": ["train=" + "[" * 50_000],
    "braces": ["train=" + "{a: " * 20_000],
    "a bracket": ["train.steps=["],
    "NUL": ["train.steps=\0"],
    "NUL in the key": ["train.\0=1"],
    "a line end": ["train.steps=1\n2"],
    "a line end in the key": ["train.st\neps=1"],
    "colours": ["\x1b[31m=1"],
    "bytes that are no UTF-8": ["train.steps=\udcff"],
    "bytes that are no UTF-8 in the key": ["\udcff=1"],
    "two documents": ["train.steps=1\n---\n2"],
    "a line that looks like a place": ["x:" + "9" * 5_000 + ": a=1", "train.steps=x"],
    "below a number": ["train.steps=3", "train.steps.a=1"],
    "below a list": ["train.remat=[a]", "train.remat.0=b"],
    "extends": ["extends=base.yaml"],
    "rules below a path": ["rules=rules.yaml", "rules.default=replicate"],
    "rules of a long path": ["mesh={data: 1}", "rules=" + "a" * 5_000],
    "rules of a long path with a colon": ["mesh={data: 1}", "rules=" + "a:" * 2_500],
    "a section that is a text": ["train=fast"],
    "null for a section": ["train=null"],
    "a thousand": [f"key{i}=1" for i in range(1_000)],
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_hostile_override(folder, name):
    (folder / "hostile.yaml").write_text("train: {steps: 3}")
    problems = refused(folder, "--config", "hostile.yaml", "--print-config", *OVERRIDES[name])
    assert all(problem.startswith("command line: ") for problem in problems), problems[:3]


TABLES = {
    "nothing": (b"", "there is no tick"),
    "idle stages": (b"-,-\n" * 50, "there is no item"),
    "NUL": (bytes(100), "is no item"),
    "not UTF-8": (b"F0\n\xff", "table.csv:2: not UTF-8: byte 0xff at offset 3"),
    "UTF-16": ("F0,B0".encode("utf-16"), "not UTF-8"),
    "YAML": (b"train: {steps: 3}", "'train:' is no item"),
    "a formula": (b"=cmd|' /C calc'!A0,F0", "is no item"),
    "a long word": (b"F" + b"0" * 900_000, "'... is no item"),
    "a number of ten digits": (b"F9999999999", "'F9999999999' is no item"),
    "a number of nine digits": (b"F999999999,B0", "microbatch 999999999 stands here and microbatch 1 nowhere"),
    "other digits": ("F\u0663".encode(), "is no item"),
    "colours": (b"\x1b[31mF0", "'\\x1b[31mF0' is no item"),
    "too large": (b"F0,-\n" * 300_000, "the file is larger than 1,000,000 bytes"),
    "many stages": (b"," * 900_000, "there is no item"),
    "many stages and an item": (b"F0" + b"," * 400_000, "holds 0 of the chunks"),
    "many rows of other lengths": (b"F0\n" + b"F0,F0\n" * 100_000, "more problems"),
    "many items in a cell": (b"F0 " * 300_000, "two F in"),
    "many microbatches in many chunks": ("\n".join(f"F{i}.{i}" for i in range(60_000)).encode(), "60,000 items for 60,000 microbatches and 60,000 chunks"),
    "many microbatches that never return": ("\n".join(f"F{i}" for i in range(40_000)).encode(), "more problems"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_hostile_table(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content, expected = TABLES[name]
    (tmp_path / "table.csv").write_bytes(content)
    (tmp_path / "run.yaml").write_text("mesh: {stage: 2}\nrules: {}\npipeline: {signal: layers, microbatches: 2, schedule: table.csv}")
    problems = refused(tmp_path, "--config", "run.yaml", "--print-config")
    assert any(expected in problem for problem in problems), problems[:3]


# -- places ------------------------------------------------------------------------------------------------------


def _socket(path):
    # A socket's path may have a hundred characters.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)


PLACES = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe")),
    "nothing": lambda path: None,
}
NAMED = {
    "config": lambda name: ["--config", name],
    "extends": lambda name: ["--config", "extends.yaml", f"--process={name[:0]}0", "--processes=1", "--coordinator=a:1"],
    "rules": lambda name: ["--config", "base.yaml", "mesh={data: 1}", f"rules={name}"],
    "schedule": lambda name: ["--config", "base.yaml", "mesh={stage: 1}", "rules={}", f"pipeline={{signal: a, microbatches: 1, schedule: {name}.csv}}"],
    "text": lambda name: ["--config", "base.yaml", f"data={{source: text, path: {name}}}"],
    "held-out text": lambda name: ["--config", "base.yaml", f"data={{source: text, path: a.txt, eval_path: {name}}}"],
    "tokens": lambda name: ["--config", "base.yaml", f"data={{source: tokens, path: {name}.npy}}"],
    "jsonl": lambda name: ["--config", "base.yaml", f"data={{source: jsonl, path: {name}.jsonl.gz}}"],
    "tokenizer": lambda name: ["--config", "base.yaml", f"data={{source: text, path: a.txt, tokenizer: {name}}}"],
}
SUFFIXES = {"schedule": ".csv", "tokens": ".npy", "jsonl": ".jsonl.gz"}


@pytest.mark.parametrize("what", NAMED)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_not_read(folder, tmp_path, monkeypatch, what, place):
    for name in ("a.txt", "base.yaml"):
        shutil.copy(folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    PLACES[place](tmp_path / f"odd{SUFFIXES.get(what, '')}")
    (tmp_path / "extends.yaml").write_text("extends: odd")
    assert refused(tmp_path, *NAMED[what]("odd"), "--print-config")


SYSTEM = ["/dev/zero", "/dev/random", "/dev/stdin", "/sys", "/proc/self/mem", "/proc/kmsg", "\0", "a" * 300, "a/" * 3_000, "~root", ""]
# What is in a file that exists, or in a folder, is another matter.
LATER = {"text": SYSTEM[3:6] + SYSTEM[-1:], "tokenizer": SYSTEM[4:6]}


@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what in ("config", "rules", "text", "tokenizer") for name in SYSTEM if name not in LATER.get(what, [])]
)
def test_what_the_system_has_of_its_own_is_not_read(folder, monkeypatch, what, name):
    monkeypatch.chdir(folder)
    quoted = json.dumps(name)
    keys = {"rules": ["mesh={data: 1}", f"rules={quoted}"], "text": [f"data={{source: text, path: {quoted}}}"], "tokenizer": [f"data={{source: text, path: a.txt, tokenizer: {quoted}}}"]}
    refused(folder, "--config", name if what == "config" else "base.yaml", *keys.get(what, []), "--print-config")


def test_a_folder_of_odd_things(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for place, make in PLACES.items():
        make(tmp_path / "data" / f"{place}.bin")
    (tmp_path / "data" / "a\nb\udcff.bin").write_bytes(b"abcd")
    (tmp_path / "run.yaml").write_text("data: {source: tokens, path: data}")
    for path in ("data", "data/*", "**/*.bin", "dat?/**"):
        problems = refused(tmp_path, "--config", "run.yaml", f"data.path={path}", "--print-config")
        assert sum("cannot be read" in problem for problem in problems) == 7, problems


def test_links_that_lead_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        (tmp_path / name).symlink_to(".")
    (tmp_path / "x.txt").write_text("text " * 100)
    (tmp_path / "run.yaml").write_text("data: {source: text, path: '**/*.txt'}")
    with watched(tmp_path):
        assert command("--config", "run.yaml", "--print-config")[0] == 0
        assert command("--config", "run.yaml", "data.path='**/**/nothing'", "--print-config")[0] == 2
        assert command("--config", "run.yaml", f"data.path='{'**/a/' * 20}*.txt'", "--print-config")[0] == 0
        assert command("--config", "run.yaml", f"data.path='{'*/' * 20}*.nothing'", "--print-config")[0] == 2
    refused(tmp_path, "--config", "run.yaml", f"data.path='{'*/' * 40}*.txt'", "--print-config")


def test_more_files_than_anyone_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.data.files.MAX_FILES", 20)
    monkeypatch.setattr("train.data.files.MAX_NAMES", 40)
    for name in range(30):
        (tmp_path / f"{name}.txt").touch()
    (tmp_path / "run.yaml").write_text("data: {source: text, path: .}")
    problems = refused(tmp_path, "--config", "run.yaml", "--print-config")
    assert len(problems) == 1 and "stands for more than 20 files" in problems[0], problems
    for name in range(30):
        (tmp_path / f"{name}.md").touch()
    problems = refused(tmp_path, "--config", "run.yaml", "data.path='*.py'", "--print-config")
    assert len(problems) == 1 and "more than 40 names in all would have to be looked at" in problems[0], problems


# -- run directories ---------------------------------------------------------------------------------------------

RUNS = {
    "a way up": (["run.name=.."], "'..' cannot name a folder"),
    "a dot": (["run.name=."], "'.' cannot name a folder"),
    "no name": (["run.name=''"], "'' cannot name a folder"),
    "a path": (["run.name=a/b"], "'a/b' cannot name a folder"),
    "a path from the top": (["run.name=/tmp"], "'/tmp' cannot name a folder"),
    "a path of another system": (["run.name='a\\b'"], "cannot name a folder"),
    "NUL in a name": (['run.name="a\\0b"'], "'a\\x00b' cannot name a folder"),
    "a line end in a name": (['run.name="a\\nb"'], "'a\\nb' cannot name a folder"),
    "colours in a name": (['run.name="\\e[31m"'], "'\\x1b[31m' cannot name a folder"),
    "a long name": (["run.name=" + "a" * 300], "is too long; a name has at most 240 bytes"),
    "a name of long letters": (["run.name=" + "\u00e4" * 150], "is too long; a name has at most 240 bytes"),
    "no directory": (["run.dir=''"], "'' cannot be a path"),
    "NUL in a directory": (['run.dir="a\\0b"'], "'a\\x00b' cannot be a path"),
    "a long directory": (["run.dir=" + "a/" * 3_000], "is too long"),
    "a long name in a directory": (["run.dir=a/" + "b" * 300], "is too long"),
    "a file": (["run.dir=a.txt"], "a.txt is no folder"),
    "below a file": (["run.dir=a.txt/b/c"], "a.txt is no folder"),
    "below a device": (["run.dir=/dev/null/run"], "/dev/null is no folder"),
    "resumes from a file": (["--resume=a.txt"], "--resume: a.txt: is no folder"),
    "resumes from a long name": (["--resume=" + "a" * 5_000], "is no folder"),
    "resumes from NUL": (["--resume=a\0b"], "--resume: a\\x00b: is no folder"),
    "allows what is no key": (["--allow-change=\x1b"], "--allow-change: \\x1b: may change anyway"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_hostile_run_directory(folder, name):
    overrides, expected = RUNS[name]
    problems = refused(folder, "--config", "base.yaml", *overrides)
    assert any(expected in problem for problem in problems), problems


ENTRIES = ["config.yaml", "data.json", "metrics.jsonl", "events.jsonl", "config.yaml.new", "metrics.jsonl.new", "sample.txt", "checkpoints", "data", "tensorboard"]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("place", ["pipe", "link to nothing", "link to a device", "link outside", "the other kind"])
def test_a_run_directory_that_leads_elsewhere(folder, tmp_path, entry, place):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    (outside / "17").mkdir(parents=True)
    if place == "link outside":
        (run / entry).symlink_to(outside)
    elif place != "the other kind":
        PLACES[place](run / entry)
    elif "." in entry:
        (run / entry).mkdir()
    else:
        (run / entry).touch()
    if place == "the other kind" and entry.endswith(".new"):
        return
    (problem,) = refused(tmp_path, "--config", str(folder / "base.yaml"), f"run.dir={run}")
    assert f"run.dir: {run}/{entry} is no " in problem
    assert [path.name for path in outside.rglob("*")] == ["17"]


DAMAGED = {
    "nothing": b"",
    "half": b'{"model": {"lay',
    "not UTF-8": b"\xff\xfe",
    "NUL": b"\0" * 100,
    "a list": b"[1]",
    "a text": b'"a"',
    "null": b"null",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a long number": b'{"a": ' + b"9" * 5_000 + b"}",
    "large": b" " * 2_000_000,
    "a tag": b"model: !!python/object/apply:os.mkdir [canary]",
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("entry", ["config.yaml", "data.json", "metrics.jsonl"])
def test_a_run_directory_that_is_damaged(folder, tmp_path, entry, name):
    run = load(folder / "base.yaml", [f"run.dir={tmp_path / 'run'}"])
    write_folder(run, {"files": 1})
    (tmp_path / "run" / entry).write_bytes(DAMAGED[name])
    if entry == "metrics.jsonl":
        with contextlib.closing(Records(tmp_path / "run")) as records, watched(tmp_path):
            records.forget_after(5)
        assert (tmp_path / "run" / entry).read_bytes() == b""
    else:
        with watched(tmp_path), pytest.raises(InputError) as caught:
            check_folder(run, Resume())
            check_data(run, {"files": 1}, Resume())
        assert_lines(caught.value.problems)
        assert all(str(tmp_path / "run" / entry) in problem for problem in caught.value.problems)


# -- data --------------------------------------------------------------------------------------------------------


def opened(folder, vocab=256, **keys):
    return open_data(DataConfig(**{"eval_tokens": 0, **keys}), seq=4, vocab=vocab, seed=0, cache_dir=folder / "cache")


def npy(header, payload=b"", version=1, length=None):
    """An .npy file with any header text."""
    text = header.encode("latin1", "replace")
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + (struct.pack("<H", size % 2**16) if version == 1 else struct.pack("<I", size % 2**32)) + text + payload


def header(descr="'<i4'", order="False", shape="(20,)", more=""):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}\n"


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


class Trap:
    """What makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("canary",)


HEADER = "its header is not that of an array of numbers"
FILES = {
    "npy of objects": ("a.npy", saved(np.array([Trap()], object), allow_pickle=True), "holds Python objects [1]"),
    "npy of objects with the name of a number": ("a.npy", npy(header("'|O'"), pickle.dumps(Trap())), "holds Python objects [20]"),
    "npy of records": ("a.npy", saved(np.zeros(3, [("a", "<i4"), ("b", "O")]), allow_pickle=True), HEADER),
    "npy of floats": ("a.npy", saved(np.zeros(9)), "holds float64 [9]"),
    "npy of complex numbers": ("a.npy", saved(np.zeros(9, complex)), "holds complex128 [9]"),
    "npy of truth": ("a.npy", saved(np.zeros(9, bool)), "holds bool [9]"),
    "npy of texts": ("a.npy", saved(np.array(["a"])), "holds '<U1' [1]"),
    "npy of dates": ("a.npy", saved(np.zeros(3, "M8[s]")), "holds '<M8[s]' [3]"),
    "npy of two dims": ("a.npy", saved(np.zeros((3, 3), int)), "holds int64 [3, 3]"),
    "npy of two dims, in Fortran order": ("a.npy", saved(np.asfortranarray(np.zeros((3, 4), int))), "holds int64 [3, 4]"),
    "npy of no dim": ("a.npy", saved(np.array(3)), "holds int64 []"),
    "npy of nothing": ("a.npy", saved(np.zeros(0, int)), "the file is empty: it holds no token"),
    "npy of negative ids": ("a.npy", saved(np.arange(-9, 9)), "token 0 is -9, but the vocabulary has 256 ids"),
    "npy of large ids": ("a.npy", saved(np.array([2**64 - 1] * 9, np.uint64)), "token 0 is 18446744073709551615"),
    "npy of ids that wrap": ("a.npy", saved(np.array([2**32 + 5] * 9)), "token 0 is 4294967301"),
    "npy of ids with the bytes the other way": ("a.npy", saved(np.array([1, 256] * 5, ">u4")), "token 1 is 256"),
    "npy that is cut": ("a.npy", saved(np.arange(100))[:-1], "but 799 bytes follow"),
    "npy that is cut in its header": ("a.npy", saved(np.arange(100))[:50], HEADER),
    "npy that is cut in its magic": ("a.npy", saved(np.arange(100))[:5], "it does not begin like one"),
    "npy with more behind": ("a.npy", saved(np.arange(100)) * 2, "The file is cut short, or holds more than one array"),
    "npy that is empty": ("a.npy", b"", "the file is empty"),
    "npy that is an archive": ("a.npy", b"PK\x03\x04" + bytes(50), "it does not begin like one"),
    "npy that is a pickle": ("a.npy", pickle.dumps(Trap()), "it does not begin like one"),
    "npy that is YAML": ("a.npy", b"train: {}", "it does not begin like one"),
    "npy of a later version": ("a.npy", npy(header(), version=9), "it does not begin like one"),
    "npy that speaks of more": ("a.npy", npy(header(shape="(1000000000000,)"), bytes(80)), "its header speaks of 1000000000000 ids of 4 bytes"),
    "npy that speaks of 2^63": ("a.npy", npy(header(shape=f"({2**63},)"), bytes(80)), HEADER),
    "npy that speaks of 10^4000": ("a.npy", npy(header(shape=f"({'9' * 4000},)"), bytes(80)), HEADER),
    "npy that speaks of less than nothing": ("a.npy", npy(header(shape="(-20,)"), bytes(80)), HEADER),
    "npy that speaks of half an id": ("a.npy", npy(header(shape="(2.5,)"), bytes(80)), HEADER),
    "npy that speaks of 99 dims": ("a.npy", npy(header(shape=f"({'1,' * 99})"), bytes(4)), "holds int32 [1, 1, 1"),
    "npy of a text for a shape": ("a.npy", npy(header(shape="'20'"), bytes(80)), HEADER),
    "npy of truth for a type": ("a.npy", npy(header(descr="True"), bytes(80)), HEADER),
    "npy with a key too many": ("a.npy", npy(header(more="'a': 1"), bytes(80)), HEADER),
    "npy without keys": ("a.npy", npy("{}", bytes(80)), HEADER),
    "npy with code in its header": ("a.npy", npy("__import__('os').mkdir('canary')", bytes(80)), HEADER),
    "npy with code for a shape": ("a.npy", npy(header(shape="__import__('os').mkdir('canary')"), bytes(80)), HEADER),
    "npy with brackets in its header": ("a.npy", npy("(" * 9_000), HEADER),
    "npy with signs in its header": ("a.npy", npy("-" * 9_000 + "1"), HEADER),
    "npy with a sum in its header": ("a.npy", npy("1+" * 4_000 + "1"), HEADER),
    "npy with spaces in its header": ("a.npy", npy(header(more=" " * 9_000 + "x")), HEADER),
    "npy with a long header": ("a.npy", npy(" " * 60_000), "its header has 60,000 bytes; at most 10,000 are read"),
    "npy with a header of 4 GB": ("a.npy", npy(header(), version=2, length=2**32 - 1), "its header has 4,294,967,295 bytes"),
    "npy of a type without end": ("a.npy", npy(header(repr("<i4," * 2_000)), bytes(80)), HEADER),
    "npy of a type with a line end": ("a.npy", npy(header(repr("<i4\n")), bytes(80)), HEADER),
    "npy of 3-byte ids": ("a.npy", npy(header("'<i3'"), bytes(60)), "holds '<i3' [20]"),
    "bin of odd size": ("a.bin", b"abc", "has 3 bytes, which is no multiple of the 2 bytes of uint16"),
    "bin that is empty": ("a.bin", b"", "the file is empty"),
    "bin of large ids": ("a.bin", b"\xff" * 40, "token 0 is 65535, but the vocabulary has 256 ids"),
    "jsonl that is empty": ("a.jsonl", b"", "the file is empty: it holds no document"),
    "jsonl of blank lines": ("a.jsonl", b"\n \n\t\r\n" * 99, "the file is empty: it holds no document"),
    "jsonl that is cut": ("a.jsonl", b'{"text": "abc', "a.jsonl:1: not valid JSON"),
    "jsonl of lists": ("a.jsonl", b'["text"]', "must be a JSON object, not a list"),
    "jsonl of null": ("a.jsonl", b"null", "must be a JSON object, not null"),
    "jsonl of infinity": ("a.jsonl", b"-Infinity", "must be a JSON object, not the number -inf"),
    "jsonl with a number for a text": ("a.jsonl", b'{"text": 1e999}', "the field 'text' must be text, not the number inf"),
    "jsonl with NaN for a text": ("a.jsonl", b'{"text": NaN}', "the field 'text' must be text, not the number nan"),
    "jsonl with null for a text": ("a.jsonl", b'{"text": null}', "the field 'text' must be text, not null"),
    "jsonl with an object for a text": ("a.jsonl", b'{"text": {"text": "a"}}', "the field 'text' must be text, not a mapping"),
    "jsonl without the field": ("a.jsonl", b'{"Text": "a"}', "has no field 'text'. It has: 'Text'"),
    "jsonl with long fields": ("a.jsonl", b'{"' + b"x" * 90_000 + b'": 1}', "has no field 'text'. It has: 'xxx"),
    "jsonl with line ends in a field": ("a.jsonl", b'{"a\\nb\\u001b": 1}', "It has: 'a\\nb\\x1b'"),
    "jsonl of many fields": ("a.jsonl", json.dumps(dict.fromkeys(map(str, range(9_000)))).encode(), "has no field 'text'. It has: '0', '1'"),
    "jsonl of a long number": ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5_000 + b"}", "not valid JSON"),
    "jsonl that is not UTF-8": ("a.jsonl", b'{"text": "\xff"}', "not UTF-8: byte 0xff at offset 10"),
    "jsonl of UTF-16": ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    "jsonl of half a pair": ("a.jsonl", b'{"text": "\\udc00"}', "holds half of a surrogate pair"),
    "jsonl of brackets": ("a.jsonl", b"[" * 500_000, "a.jsonl:1: "),
    "jsonl of brackets that close": ("a.jsonl", b"[" * 200_000 + b"]" * 200_000, "the JSON is nested too deep"),
    "jsonl of braces": ("a.jsonl", b'{"a":' * 200_000, "a.jsonl:1: "),
    "jsonl of NUL": ("a.jsonl", bytes(1_000), "not valid JSON"),
    "jsonl of a long line": ("a.jsonl", lambda: b'{"text": "' + b"x" * (1 << 24) + b'"}', "a.jsonl:1: the line is longer than 16,777,216 bytes"),
    "jsonl of a long second line": ("a.jsonl", lambda: b'{"text": "a"}\n' + b"x" * (1 << 25), "a.jsonl:2: the line is longer than 16,777,216 bytes"),
    "jsonl of a thousand bad lines": ("a.jsonl", b"{\n" * 1_000, "20 problems; the rest was not read"),
    "gzip that is none": ("a.jsonl.gz", b'{"text": "a"}', "the gzip data is damaged or cut short"),
    "gzip that is empty": ("a.jsonl.gz", b"", "the file is empty: it holds no document"),
    "gzip of nothing": ("a.jsonl.gz", gzip.compress(b""), "the file is empty: it holds no document"),
    "gzip that is cut": ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n')[:-9], "the gzip data is damaged or cut short"),
    "gzip that is cut in its header": ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n')[:5], "the gzip data is damaged or cut short"),
    "gzip with garbage behind": ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n') + b"garbage", "the gzip data is damaged or cut short"),
    "gzip with another checksum": ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n')[:-8] + bytes(8), "the gzip data is damaged or cut short"),
    "gzip of an unknown method": ("a.jsonl.gz", b"\x1f\x8b\x63" + bytes(20), "the gzip data is damaged or cut short"),
    "gzip of one long line": ("a.jsonl.gz", lambda: gzip.compress(bytes(1 << 27)), "a.jsonl.gz:1: the line is longer than 16,777,216 bytes"),
    "gzip of a long text": ("a.jsonl.gz", lambda: gzip.compress(b'{"text": "' + b"x" * (1 << 26)), "a.jsonl.gz:1: the line is longer than 16,777,216 bytes"),
    "gzip of blank lines": ("a.jsonl.gz", lambda: gzip.compress(b"\n" * (1 << 27)), "the data is more than 200 times as large as the file"),
    "gzip in gzip": ("a.jsonl.gz", gzip.compress(gzip.compress(b'{"text": "abc"}\n')), "not UTF-8"),
    "text that is empty": ("a.txt", b"", "the file is empty"),
    "text that is too short": ("a.txt", b"abc", "the train split of a.txt has 3 tokens, but one window of seq 4 needs 5"),
}


@pytest.fixture(scope="module")
def sources():
    return {".npy": "tokens", ".bin": "tokens", ".jsonl": "jsonl", ".gz": "jsonl", ".txt": "text"}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_data_file(tmp_path, monkeypatch, sources, name):
    monkeypatch.chdir(tmp_path)
    file, content, expected = FILES[name]
    (tmp_path / file).write_bytes(content() if callable(content) else content)
    with watched(tmp_path), pytest.raises(InputError) as caught:
        opened(tmp_path, source=sources[Path(file).suffix], path=file)
    assert_lines(caught.value.problems)
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems
    assert not (tmp_path / "canary").exists()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize("name", ["npy of objects", "jsonl with NaN for a text", "gzip of blank lines", "text that is too short"])
def test_a_hostile_data_file_ends_the_command(tmp_path, monkeypatch, sources, name):
    monkeypatch.chdir(tmp_path)
    file, content, expected = FILES[name]
    (tmp_path / file).write_bytes(content() if callable(content) else content)
    (tmp_path / "run.yaml").write_text(f"model: {{layers: 1, embed: 8, heads: 2, seq: 4}}\ndata: {{source: {sources[Path(file).suffix]}, path: {file}, eval_tokens: 0}}\n")
    code, out, lines = command("--config", "run.yaml", "xla.cache=null")
    assert (code, out) == (2, "")
    assert [line for line in lines if line.startswith("run.yaml:2: ") and expected in line] == lines
    assert not (tmp_path / "canary").exists()


def test_more_devices_than_can_be_started(folder):
    problems = refused(folder, "--config", "base.yaml", "xla.cache=null", "devices.virtual_cpu=1000000")
    assert problems == ["command line: devices.virtual_cpu=1000000: devices.virtual_cpu: 1,000,000 is too large; 1,024 is the most that is started; jgt check and jgt plan take any number"]


def test_files_as_others_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = list(range(20))
    variants = [
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (20,), }          \n", np.arange(20, dtype="<i4").tobytes()),
        npy("{'shape': (20L,), 'fortran_order': True, 'descr': '>i8'}", np.arange(20, dtype=">i8").tobytes(), version=2),
        npy('{"descr":"|u1","fortran_order":False,"shape":(20,)}', np.arange(20, dtype="u1").tobytes(), version=3),
        saved(np.arange(20, dtype="uint16")),
    ]
    for content in variants:
        (tmp_path / "a.npy").write_bytes(content)
        (batch,) = opened(tmp_path, source="tokens", path="a.npy", shuffle=False).train_batches(0, 4, range(4), 1)
        assert batch["inputs"].ravel().tolist() == ids[:16]


TOKENIZER_MODEL = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
TOKENIZER = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [{"id": 3, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": TOKENIZER_MODEL,
}


def tokenizer(**parts):
    """A tokenizer.json with other parts."""
    return copy.deepcopy(TOKENIZER) | parts


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 3}, "unk_token": "[UNK]"}
TOKENIZERS = {
    "nothing": (b"", "not a tokenizer.json"),
    "no JSON": (b"{", "not a tokenizer.json"),
    "no object": (b"[]", "not a tokenizer.json"),
    "NUL": (bytes(100), "not a tokenizer.json"),
    "not UTF-8": (b'{"version": "\xff"}', "not a tokenizer.json"),
    "a pickle": (pickle.dumps(Trap()), "not a tokenizer.json"),
    "brackets": (b"[" * 100_000, "not a tokenizer.json"),
    "objects": (b'{"model":' * 100_000, "not a tokenizer.json"),
    "no model": (tokenizer(model=None), "not a tokenizer.json"),
    "an unknown model": (tokenizer(model={"type": "os.system", "vocab": {}}), "not a tokenizer.json"),
    "negative ids": (tokenizer(model=WORDS | {"vocab": {"a": -1}}), "not a tokenizer.json"),
    "ids past 32 bits": (tokenizer(model=WORDS | {"vocab": {"a": 2**40}}), "not a tokenizer.json"),
    "ids that are no numbers": (tokenizer(model=WORDS | {"vocab": {"a": "b"}}), "not a tokenizer.json"),
    "merges of what is not there": (tokenizer(model=TOKENIZER_MODEL | {"merges": [["x", "y"]]}), "not a tokenizer.json"),
    "a pattern that is none": (tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}), "not a tokenizer.json"),
    "a pattern without end": (tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}), "cannot encode the text"),
    "a word that is not known": (tokenizer(model=WORDS), "cannot encode the text"),
    "large ids": (tokenizer(model=TOKENIZER_MODEL | {"vocab": {"a": 2**32 - 1, "b": 1, "<eos>": 3}, "merges": []}), "is 4294967295, but the vocabulary has 256 ids"),
    "no end of a text": (tokenizer(added_tokens=[]), "no end-of-text token"),
    "no vocabulary": (tokenizer(model=WORDS | {"vocab": {}}, added_tokens=[]), "no end-of-text token"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content, expected = TOKENIZERS[name]
    (tmp_path / "t.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 40 + "b"}))
    with watched(tmp_path), pytest.raises(InputError) as caught:
        opened(tmp_path, source="jsonl", path="a.jsonl", tokenizer="t.json")
    assert_lines(caught.value.problems)
    assert any(expected in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "empty", "a link", "a pipe", "a folder"])
def test_encoded_text_that_is_damaged_is_made_again(tmp_path, monkeypatch, harm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20)

    def tokens():
        (batch,) = opened(tmp_path, source="jsonl", path="a.jsonl", shuffle=False).train_batches(0, 8, range(8), 1)
        return batch["inputs"].tobytes()

    whole = tokens()
    (cached,) = (tmp_path / "cache").iterdir()
    content = cached.read_bytes()
    cached.unlink()
    if harm == "a link":
        cached.symlink_to("nothing")
    elif harm == "a pipe":
        os.mkfifo(cached)
    elif harm == "a folder":
        cached.mkdir()
    else:
        cached.write_bytes({"flip": bytes([content[0] ^ 1]) + content[1:], "cut": content[:-1], "longer": content + b"a", "empty": b""}[harm])
    with watched(tmp_path):
        if harm == "a folder":
            with pytest.raises(InputError, match="cannot be written"):
                tokens()
        else:
            assert tokens() == whole
            assert cached.read_bytes() == content


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture
def step(tmp_path):
    """A folder of checkpoints with one whole step."""
    steps = Steps(tmp_path / "run" / "checkpoints")
    saving = steps.saving(7)
    (saving / "state").mkdir(parents=True)
    (saving / "state" / "array").write_bytes(b"0123456789" * 10)
    (saving / "state" / "_METADATA").write_text("{}")
    steps.finish(
        Manifest(
            step=7,
            samples=112,
            mesh={"data": 2},
            versions={"jax": "0.10.2"},
            fingerprints={"config": {"run.seed": 1}, "data": {"bytes": 5}},
            arrays=(ArrayEntry(path="params/kernel", shape=(5, 4), dtype="float32"),),
            files=manifest.file_entries(saving, sha256=True),
        )
    )
    return steps


def found_or_broken(steps, number=7):
    """Reads a step, which must be whole (then ""), or broken for a reason of one line."""
    with watched(steps.folder):
        try:
            steps.read(number)
        except BrokenError as error:
            reason = str(error)
        else:
            return ""
    assert_lines([reason])
    return reason


def changed(*path, to):
    """What puts a value at a place of a manifest."""

    def change(values):
        inner = values
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = to
        return values

    return change


DEEP = b"[" * 100_000
MANIFESTS = {
    "nothing": (b"", "manifest.json is damaged: JSONDecodeError"),
    "half": (b'{"format": 1, "st', "manifest.json is damaged: JSONDecodeError"),
    "zeros": (bytes(500), "manifest.json is damaged"),
    "not UTF-8": (b"\xff" * 500, "manifest.json is damaged: UnicodeDecodeError"),
    "UTF-16 of nothing": (b"\xff\xfe", "manifest.json is damaged"),
    "a pickle": (pickle.dumps(Trap()), "manifest.json is damaged"),
    "brackets": (DEEP, "manifest.json is damaged"),
    "brackets that close": (DEEP + b"]" * 100_000, "it is nested too deep"),
    "objects": (b'{"a":' * 100_000, "manifest.json is damaged"),
    "too large": (lambda _: b" " * ((1 << 26) + 1), "the file is larger than 67,108,864 bytes"),
    "a list": (b"[]", "[] is no mapping"),
    "null": (b"null", "None is no mapping"),
    "no keys": (b"{}", "format None, not 1"),
    "another format": (changed("format", to=2), "format 2, not 1"),
    "a format of text": (changed("format", to="1"), "format '1', not 1"),
    "a long format": (changed("format", to="x" * 5_000), "format 'xxx"),
    "a format that is true": (changed("format", to=True), "format True, not 1"),
    "a format that is a float": (changed("format", to=1.0), "format 1.0, not 1"),
    "another step": (changed("step", to=8), "its manifest is that of step 8"),
    "no step": (changed("step", to=None), "None is not a whole number"),
    "a step that is true": (changed("step", to=True), "True is not a whole number"),
    "a step that is a float": (changed("step", to=7.0), "7.0 is not a whole number"),
    "a step of text": (changed("step", to="7"), "'7' is not a whole number"),
    "a step without end": (changed("step", to=float("inf")), "inf is not a whole number"),
    "a step of many digits": (b'{"format": 1, "step": ' + b"9" * 5_000 + b"}", "manifest.json is damaged: ValueError"),
    "negative samples": (changed("samples", to=-1), "-1 is not a whole number"),
    "samples without end": (changed("samples", to=2**62), "is not a whole number from 0 to 2^62"),
    "samples that are no number": (changed("samples", to=float("nan")), "nan is not a whole number"),
    "samples of 10^300": (changed("samples", to=10**300), "is not a whole number from 0 to 2^62"),
    "a mesh of pairs": (changed("mesh", to=[["data", 2]]), "[['data', 2]] is no mapping"),
    "a mesh of texts": (changed("mesh", to={"data": "2"}), "'2' is not a whole number"),
    "versions of numbers": (changed("versions", to={"jax": 1}), "1 is not text"),
    "fingerprints of text": (changed("fingerprints", to="abc"), "'abc' is no mapping"),
    "arrays of text": (changed("arrays", to="abc"), "'abc' is no list"),
    "an array of text": (changed("arrays", 0, to="abc"), "TypeError"),
    "an array without a path": (changed("arrays", 0, to={}), "KeyError: 'path'"),
    "a negative shape": (changed("arrays", 0, "shape", to=[-1]), "-1 is not a whole number"),
    "a shape of floats": (changed("arrays", 0, "shape", to=[5.0, 4.0]), "5.0 is not a whole number"),
    "a shape of truth": (changed("arrays", 0, "shape", to=[True]), "True is not a whole number"),
    "a shape of text": (changed("arrays", 0, "shape", to="54"), "'54' is no list"),
    "an empty text for a shape": (changed("arrays", 0, "shape", to=""), "'' is no list"),
    "a large shape": (changed("arrays", 0, "shape", to=[2**63]), "is not a whole number from 0 to 2^62"),
    "a type that is none": (changed("arrays", 0, "dtype", to="os.system"), "'os.system' is no element type"),
    "a type of records": (changed("arrays", 0, "dtype", to="i4,O"), "'i4,O' is no element type"),
    "a type of objects": (changed("arrays", 0, "dtype", to="object"), "'object' is no element type"),
    "a path to the top": (changed("files", 0, "path", to="/etc/passwd"), "the path '/etc/passwd' leads outside"),
    "a path upwards": (changed("files", 0, "path", to="../../other/7/state/array"), "leads outside"),
    "a path up and down": (changed("files", 0, "path", to="state/../../8/array"), "leads outside"),
    "a path to itself": (changed("files", 0, "path", to="."), "the path '.' leads outside"),
    "no path": (changed("files", 0, "path", to=""), "the path '' leads outside"),
    "a path of NUL": (changed("files", 0, "path", to="a\0b"), "a\\x00b is missing"),
    "a path of lines": (changed("files", 0, "path", to="a\nb"), "a\\nb is missing"),
    "a long path": (changed("files", 0, "path", to="a/" * 1_000 + "a"), "leads outside, or is too long"),
    "a path of a number": (changed("files", 0, "path", to=3), "3 is not text"),
    "a path of half a pair": (changed("files", 0, "path", to="\ud800"), "\\ud800 is missing"),
    "a negative size": (changed("files", 0, "size", to=-1), "-1 is not a whole number"),
    "a large size": (changed("files", 0, "size", to=10**15), "bytes instead of 1000000000000000"),
    "a size of text": (changed("files", 0, "size", to="100"), "'100' is not a whole number"),
    "another checksum": (changed("files", 0, "crc32", to=0), "has other content than was written"),
    "a checksum of text": (changed("files", 0, "crc32", to="0"), "'0' is not a whole number"),
    "another SHA-256": (changed("files", 0, "sha256", to="0" * 64), "has other content than was written"),
    "a SHA-256 of a number": (changed("files", 0, "sha256", to=1), "1 is not text"),
    "a file less": (changed("files", to=[]), "does not belong to it"),
    "files of text": (changed("files", to="abc"), "'abc' is no list"),
    "ten thousand files": (lambda values: json.dumps(values | {"files": [{"path": f"{i}", "size": 1, "crc32": 1} for i in range(10_000)]}).encode(), "and 9997 more problems"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest(step, name):
    path = step.path(7) / manifest.NAME
    change, expected = MANIFESTS[name]
    content = change if isinstance(change, bytes) else change(json.loads(path.read_text()))
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    reason = found_or_broken(step)
    assert expected in reason
    # As one line of a report, which names the folder too.
    assert len(reason) < 2_000
    assert step.set_aside(7).name == "7.broken" and step.listed() == []


INSIDE = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Trap())),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link outside": lambda path: path.symlink_to("/"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link back": lambda path: path.symlink_to("."),
    "a folder with a file": lambda path: (path.mkdir(), (path / "a").touch()),
    "a name with a line end": lambda path: path.with_name("a\nb").touch(),
    "a name that is no UTF-8": lambda path: path.with_name("\udcff").touch(),
    "deep folders": lambda path: (path / "/".join("a" * 300)).mkdir(parents=True) or (path / "/".join("a" * 301)).touch(),
}


@pytest.mark.parametrize("where", ["", "state"])
@pytest.mark.parametrize("name", INSIDE)
def test_what_does_not_belong_to_a_step(step, monkeypatch, name, where):
    monkeypatch.chdir(step.folder)
    INSIDE[name](step.path(7) / where / "odd.pkl")
    assert found_or_broken(step)
    assert not Path("canary").exists()


@pytest.mark.parametrize("name", ["a pipe", "a socket", "a link to a device"])
def test_a_file_of_a_step_that_is_listed_but_none(step, name):
    array = step.path(7) / "state" / "array"
    array.unlink()
    INSIDE[name](array)
    path = step.path(7) / manifest.NAME
    values = json.loads(path.read_text())
    next(entry for entry in values["files"] if entry["path"] == "state/array").update(size=0, crc32=0, sha256=None)
    path.write_text(json.dumps(values))
    assert "state/array " in found_or_broken(step)


@pytest.mark.parametrize("name", ["a pipe", "a link to a device", "a link outside", "a link back"])
def test_a_manifest_that_is_no_file(step, name):
    path = step.path(7) / manifest.NAME
    path.unlink()
    INSIDE[name](path)
    assert found_or_broken(step)


@pytest.mark.parametrize("name", ["0", "007", "-1", "1.0", "1e3", "\u0667", "\u00b2", "7 ", "9" * 200, "99999999999", "7.broken", "7.saving", "trash", "a\nb"])
@pytest.mark.parametrize("kind", ["folder", "file", "pipe", "link"])
def test_odd_names_among_the_steps(step, tmp_path, name, kind):
    """They are no steps; what an interrupted save left goes, without what a link leads to."""
    path, outside = step.folder / name, tmp_path / "run" / "outside"
    outside.mkdir()
    (outside / "8").mkdir()
    {"folder": Path.mkdir, "file": Path.touch, "pipe": os.mkfifo, "link": lambda path: path.symlink_to(outside)}[kind](path)
    with watched(tmp_path):
        assert step.listed() == [7]
        step.clear()
        step.retire(1)
        assert step.listed() == [7]
        step.set_aside(7)
    assert (outside / "8").is_dir()
    assert os.path.lexists(path) == (name not in ("7.saving", "trash"))


def test_steps_that_are_no_folder(tmp_path):
    for make in (Path.touch, os.mkfifo, lambda path: path.symlink_to(path.name)):
        path = tmp_path / "checkpoints"
        make(path)
        with watched(tmp_path):
            assert Steps(path).listed() == []
            Steps(path).clear()
        path.unlink()


def test_a_checkpoint_with_pickles_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = State(jnp.asarray(3), {"kernel": jnp.ones((4, 4))}, {"mu": jnp.ones((4, 4))})
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", CheckpointConfig())) as checkpoints:
        for number in (1, 2):
            checkpoints.save(state, number, samples=number)
        checkpoints.wait()
        for name in ("evil.pkl", "state/checkpoint", "state/_CHECKPOINT_METADATA.pkl"):
            (tmp_path / "checkpoints" / "2" / name).write_bytes(pickle.dumps(Trap()))
        found, reports = checkpoints.find()
        assert found.manifest.step == 1
        assert_lines(reports)
        assert find_in(tmp_path / "nowhere") == find_in(Path("a" * 5_000)) == find_in(Path("a\0b")) == (None, [])
    assert not (tmp_path / "canary").exists()


# -- fuzz: configs -----------------------------------------------------------------------------------------------


def as_yaml(tree):
    return document.dump(tree).encode("utf-8", "surrogatepass")


yaml_texts = mutated(RUN).map(as_yaml) | spoiled(as_yaml(RUN)) | mutated(RUN, most=1).map(as_yaml).flatmap(spoiled)


@fuzz(150)
@given(yaml_texts)
def test_any_config_is_printed_or_refused(folder, data):
    (folder / "run.yaml").write_bytes(data)
    with watched(folder):
        code, out, lines = command("--config", "run.yaml", "--print-config")
    if code == 2:
        assert out == ""
        assert_lines(lines)
    else:
        assert (code, lines) == (0, [])
        (folder / "printed.yaml").write_text(out)
        assert command("--config", "printed.yaml", "--print-config") == (0, out, [])


KEYS = ["model.layers", "mesh", "mesh.data", "rules", "rules.signals.**.out", "data.path", "data.mixture", "run.name", "run.dir", "pipeline.schedule", "train.batch", "budget.x", "a" * 300, ".".join("a" * 40), "extends", "\udcff", "a\nb", ""]


@fuzz(60)
@given(st.lists(st.tuples(st.sampled_from(KEYS), values.map(document.dump) | st.sampled_from(TEXTS)).map("=".join) | st.text(max_size=30), min_size=1, max_size=3))
def test_any_override_is_taken_or_refused(folder, overrides):
    (folder / "run.yaml").write_bytes(as_yaml(RUN))
    read_or_refused(folder, load, "run.yaml", overrides)


@fuzz(60)
@given(mutated(RULES).map(as_yaml) | spoiled(as_yaml(RULES)))
def test_any_rules_are_read_or_refused(folder, data):
    (folder / "any.yaml").write_bytes(data)
    rules = read_or_refused(folder, load_rules, "any.yaml")
    if rules is not None:
        read_or_refused(folder, load, "base.yaml", ["rules=any.yaml", "mesh={data: -1, stage: 1, tensor: 1}"])


@fuzz(60)
@given(spoiled(TABLE.encode()) | st.lists(st.lists(st.sampled_from(["F0", "B0", "F1.1", "B1.1", "W0", "-", "", "F999999999", "B0.999999999", "x" * 999]), max_size=3).map(",".join), max_size=6).map("\n".join).map(str.encode))
def test_any_table_is_read_or_refused(folder, data):
    (folder / "any.csv").write_bytes(data)
    read_or_refused(folder, read_table, "any.csv")


# -- fuzz: data --------------------------------------------------------------------------------------------------


DESCRS = ["<i4", ">i4", "|u1", "<u8", "<f4", "|O", "|b1", "<U3", "|V4", "<M8[s]", "i", "", "x", 3, None, [("a", "<i4")], ["<i4"], "<i99999", "<i4" * 999]
SHAPES = [(5,), (), (0,), (4, 5), (-1,), (10**18,), (2**63,), (10**30,), (True,), (5.0,), ("5",), [5], 5, None, (1,) * 70]
EXPRESSIONS = ["__import__('os').system('touch canary')", "{" * 99, "(" * 150, "-" * 9000 + "1", "[" * 5000, "1+" * 3000 + "1", "{'descr': '<i4', 'fortran_order': False, 'shape': (5L,), }", "\0", "{}", "{1: 2}", "'" * 30, "{[]: 1}", "9" * 6000, "é"]
headers = st.builds(lambda d, f, s: repr({"descr": d, "fortran_order": f, "shape": s}), st.sampled_from(DESCRS), st.sampled_from([False, True, 0, None, "x"]), st.sampled_from(SHAPES)) | st.sampled_from(EXPRESSIONS)
PLAIN = npy("{'descr': '<i4', 'fortran_order': False, 'shape': (20,), }\n", np.arange(20, dtype="<i4").tobytes())
npys = st.builds(npy, headers.map(lambda text: text + "\n"), st.sampled_from([b"", bytes(20), bytes(80), bytes(81)]), st.sampled_from([1, 1, 1, 2, 3, 4, 255]), st.sampled_from([None, None, None, 0, 5, 2**16 - 1, 2**32 - 1])) | spoiled(PLAIN)


@fuzz(150)
@given(npys)
def test_any_npy_file_is_read_or_refused(folder, data):
    (folder / "any.npy").write_bytes(data)
    read_or_refused(folder, lambda: opened(folder, source="tokens", path="any.npy"))


DOCUMENT = {"text": "some words", "id": 3, "tags": [{"a": None}, 1.5]}


def as_json(tree):
    return json.dumps(tree).encode()


json_lines = st.lists(mutated(DOCUMENT, most=1).map(as_json) | spoiled(as_json(DOCUMENT), most=1) | st.just(as_json(DOCUMENT)), max_size=4).map(b"\n".join)
gzips = json_lines.map(gzip.compress) | json_lines.map(gzip.compress).flatmap(spoiled)


@fuzz(100)
@given(st.tuples(st.just("any.jsonl"), json_lines) | st.tuples(st.just("any.jsonl.gz"), gzips))
def test_any_jsonl_file_is_read_or_refused(folder, file):
    name, data = file
    (folder / name).write_bytes(data)
    read_or_refused(folder, lambda: opened(folder, source="jsonl", path=name))


@fuzz(100)
@given(mutated(TOKENIZER).map(as_json) | spoiled(as_json(TOKENIZER)))
def test_any_tokenizer_is_read_or_refused(folder, data):
    (folder / "any.json").write_bytes(data)
    (folder / "doc.jsonl").write_bytes(b'{"text": "ab ba"}\n')
    read_or_refused(folder, lambda: opened(folder, source="jsonl", path="doc.jsonl", tokenizer="any.json"))


@fuzz(60)
@given(st.sampled_from(["text", "tokens", "jsonl"]), st.sampled_from(["path", "eval_path"]), st.sampled_from(TEXTS) | st.text(st.sampled_from("a*?[]!/.\0\n~"), max_size=12))
def test_any_path_is_read_or_refused(folder, source, key, path):
    config = DataConfig(**{"source": source, "path": "a.bin", "eval_tokens": 0, key: path})
    read_or_refused(folder, lambda: open_data(config, seq=4, vocab=256, seed=0, cache_dir=folder / "cache"))


# -- fuzz: a run's own files -------------------------------------------------------------------------------------


@fuzz(150)
@given(st.data())
def test_any_manifest_is_read_or_broken(step, data):
    path = step.path(7) / manifest.NAME
    whole = path.read_bytes()
    path.write_bytes(data.draw(mutated(json.loads(whole)).map(as_json) | spoiled(whole)))
    if not found_or_broken(step):
        found = manifest.read(step.path(7))
        assert found.step == 7 and 0 <= found.samples < 2**62
        assert all(type(n) is int and n >= 0 for entry in found.arrays for n in entry.shape)
    path.write_bytes(whole)


STARTED = {"config.yaml": None, "data.json": {"source": "text", "files": 1, "train_tokens": 100}, "metrics.jsonl": {"step": 3, "loss": 1.5}}


@fuzz(100)
@given(st.sampled_from(sorted(STARTED)), st.data())
def test_any_run_directory_is_continued_or_refused(folder, name, data):
    (folder / "run.yaml").write_bytes(as_yaml({"model": {"layers": 2}, "run": {"dir": "started"}}))
    run = load("run.yaml")
    shutil.rmtree("started", ignore_errors=True)
    write_folder(run, STARTED["data.json"])
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
    records.close()
