"""Wrong input: exit code 2, every problem in one message, with its line, before JAX is imported where JAX isn't needed."""

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from train.__main__ import main

WITHOUT_JAX = """
import sys, time
from train.__main__ import main
for argv in {cases!r}:
    started = time.perf_counter()
    print("exit", main(argv), file=sys.stderr)
    assert time.perf_counter() - started < 1, argv
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""


@pytest.fixture
def write(tmp_path):
    """Writes an indented YAML text to a file of tmp_path."""

    def _write(name, text):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    return _write


@pytest.fixture
def refused(capsys):
    """Runs the command, which must refuse its input. Returns the problems."""

    def _refused(path, *arguments):
        assert main(["--config", str(path), *arguments]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err.splitlines()

    return _refused


def assert_found(problems, *expected):
    """Each expected text is in one problem, and there is no other problem."""
    assert len(problems) == len(expected), problems
    for text in expected:
        assert sum(text in problem for problem in problems) == 1, (text, problems)


def python(code, root, timeout=60):
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=timeout)


# -- without JAX -------------------------------------------------------------------------------------------------


def test_config_problems_need_no_jax(write, root, tmp_path):
    cases = [
        write("keys.yaml", "model: {layer: 2}"),
        write("rules.yaml", "mesh: {data: 2}\nrules: {axes: {batch: [dat]}, default: replicate}"),
        write("mesh.yaml", "devices: {virtual_cpu: 8}\nmesh: {data: 3}"),
        write("data.yaml", "data: {source: text, path: nowhere.txt}"),
        write("tag.yaml", "train: {steps: !!int 3}"),
        write("good.yaml", "train: {steps: 3}"),
        tmp_path / "missing.yaml",
    ]
    argvs = [["--config", str(path)] for path in cases if path.name != "good.yaml"]
    argvs += [["--config", str(tmp_path / "good.yaml"), *more] for more in (["train.step=3"], ["train.steps"], ["--processes", "2"])]
    done = python(WITHOUT_JAX.format(cases=argvs), root)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"exit (\d)", done.stderr) == ["2"] * len(argvs)


def test_help_and_the_resolved_config_need_no_jax(write, root):
    path = str(write("good.yaml", "mesh: {data: -1}\nrules: {axes: {batch: [data]}, default: replicate}"))
    code = f"""
import sys
from train.__main__ import main
assert main(["--config", {path!r}, "--print-config"]) == 0
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert "jax" not in sys.modules
"""
    done = python(code, root)
    assert done.returncode == 0, done.stderr
    assert "virtual_cpu: null" in done.stdout
    assert "usage: jgt train" in done.stdout


def test_the_problems_of_a_config_come_at_once(write, refused):
    path = write(
        "run.yaml",
        """
        run: {name: a/b}
        devices: {virtual_cpu: 8}
        model: {layer: 2, heads: four}
        mesh:
          data: 3
        rules: rules.yaml
        data: {source: text, path: nowhere.txt}
        optimizer: {lr: 0}
        train: {batch: 10, accumulate: 4, remat: bloc}
        """,
    )
    write(
        "rules.yaml",
        """
        axes: {batch: [data]}
        signals:
          embed: {out: [batch, tensro, tensro]}
          layers: {outs: [batch]}
        """,
    )
    folder = path.parent
    problems = refused(path, "train.step=3", "seed", "--processes", "2", "--process", "5")
    assert_found(
        problems,
        "command line: --coordinator: missing. --coordinator, --processes, --process belong together",
        "command line: --process: must be between 0 and 1 (--processes 2), not 5",
        "command line: seed: an override is written key.sub=value, for example train.steps=300",
        "command line: train.step=3: train.step: unknown key. Did you mean 'steps'?",
        f"{path}:1: run.name: 'a/b' cannot name a folder. Use letters, digits, dots and dashes",
        f"{path}:3: model.layer: unknown key. Did you mean 'layers'?",
        f"{path}:3: model.heads: must be a whole number, not the text 'four'",
        f"{path}:7: data.path: no such file or folder: nowhere.txt",
        f"{path}:8: optimizer.lr: 0.0 is too small; it must be greater than 0",
        f"{path}:9: train.remat: 'bloc' is not one of none, matmuls, attention, block, auto. Did you mean 'block'?",
        f"{folder}/rules.yaml:3: signals.embed.out: the axis 'tensro' appears twice in one spec",
        f"{folder}/rules.yaml:4: signals.layers.outs: unknown key. Did you mean 'out'?",
        f"{path}:4: mesh: data=3 = 3 devices, but there are 16. Make the product 16, or one size -1",
    )


def test_rules_against_the_mesh(write, refused):
    rules = "rules: {axes: {batch: [data]}, signals: {embed: {out: [batch, tensro]}}, default: replicate}"
    path = write("run.yaml", f"mesh: {{data: 4, tensor: 2}}\ntrain: {{batch: 6}}\n{rules}\n")
    assert_found(
        refused(path),
        f"{path}:3: embed: the mesh has no axis 'tensro'. Did you mean 'tensor'? To turn the axis off, give it the size 1",
        f"{path}:2: train.batch: {path}:3: inputs: dim 0 of the input batch [6, 128] has size 6, which data=4 "
        f"does not divide. A size of 4 or 8 would fit",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rules: {default: replicate}", ":1: rules: rules need a mesh: section with the axes that they name"),
        ("mesh: {data: 2}\nrules: ruled.yaml", "ruled.yaml. Did you mean 'rules.yaml'?"),
        ("mesh: {data: 2}\nrules: 3", ":2: rules: rules must be the path of a file or a mapping, not 3"),
        ("mesh: {data: -1, fsdp: -1}", ":1: mesh: only one size may be -1; data and fsdp are"),
        ("mesh: {data: 0}", ":1: mesh.data: an axis size is a whole number of at least 1, or -1 for the remaining devices"),
        # Nothing is derived from a wrong size.
        ("mesh: {data: 2, tensor: 0}\nrules: jgt:tensor\ndevices: {virtual_cpu: 8}", ":1: mesh.tensor: an axis size is a whole number"),
        (
            "mesh: {data: 2}\nrules: {signals: {embed: {out: [data, None]}}, default: replicate}",
            ":2: embed: the mesh has no axis 'None'. Write null for a dim that no axis splits",
        ),
        ("model: {kind: a/b}", "'a/b' is not one of llama, gpt. A model of Hugging Face is model.hf. Code of your own is MODULE:NAME"),
        ("data: {source: hf}", "preferences, mixture. A dataset of Hugging Face is hf:NAME. Code of your own is MODULE:NAME (docs/own.md)"),
        ("optimizer: {name: lion}", ":1: optimizer.name: 'lion' is not one of adamw, muon. Code of your own is MODULE:NAME (docs/own.md)"),
        (
            "train: {batch: 10, accumulate: 4}",
            ":1: train.accumulate: batch 10 is not divisible by accumulate 4. These divide it: 1, 2, 5, 10",
        ),
        ("model: {embed: 10, heads: 4}", ":1: model.heads: embed 10 is not divisible by heads 4"),
        ("model: {heads: 4, kv_heads: 3}", ":1: model.kv_heads: heads 4 is not divisible by kv_heads 3. Use a divisor of 4"),
        ("model: {embed: 12, heads: 4}", ":1: model.heads: embed 12 / heads 4 is 3, but RoPE needs an even size of heads. Use heads 1, 2"),
        ("model: {full_layers: [1]}", ":1: model.full_layers: without a window all layers see all earlier tokens. Give window"),
        ("model: {window: 8, full_layers: [4]}", ":1: model.full_layers: there are 4 layers, numbered from 0, so there is no layer 4"),
        ("model: {rope_share: 0.3, head_dim: 10}", ":1: model.rope_share: RoPE rotates pairs, but 0.3 of a head is the odd"),
        ("model: {norm_place: both, parallel: one_norm}", ":1: model.parallel: a parallel block has norms before its parts only"),
        (
            "model: {rope_scaling: {kind: longrope, short: [1.0], long: [1.0]}}",
            ":1: model.rope_scaling: short and long need 16 divisors each",
        ),
        ("model: {rope_scaling: {kind: longrope}}", ":1: model.rope_scaling.kind: longrope needs the divisors short and long"),
        ("model: {rope_scaling: {low: 2.0}}", ":1: model.rope_scaling.low: is not a key of linear. Keys of it: kind, factor, magnitude"),
        ("model: {gated: false, experts: {}}", ":1: model.experts: experts are gated MLPs behind the attention"),
        ("model: {hf: /no/such/folder}", ":1: model.hf: /no/such/folder: cannot be read: No such file or directory. Name a folder"),
        # The loss is there, although its section cannot be read.
        ("train: {loss: 'a:b', stps: 1}\ndata: {source: 'hf:a/b'}", ":1: train.stps: unknown key. Did you mean 'steps'?"),
        ("train: {loss: 3}\ndata: {source: 'hf:a/b'}", ":1: train.loss: must be text, not the whole number 3"),
        ("train:\n  steps: 1\n  steps: 2", ":3: train.steps: this key is given twice; the first is at"),
        ("train: &a {}\nmodel: 3", ":1: train: the anchor &a is not allowed"),
        ("train: [1]", ":1: train: must be a mapping of keys to values, not a list"),
        ("# " + "x" * 1_000_000, "the file is larger than 1,000,000 bytes"),
    ],
)
def test_one_problem(write, refused, text, expected):
    write("rules.yaml", "default: replicate")
    (problem,) = refused(write("run.yaml", text))
    assert expected in problem


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("extends", "extends: URL"),
        ("rules", "mesh: {data: 2}\nrules: URL"),
        ("run.spool", "run: {dir: s3://bucket/run, spool: URL}"),
        ("xla.cache", "xla: {cache: URL}"),
        ("data.cache", "data: {cache: URL}"),
        ("checkpoint.key", "checkpoint: {key: URL}"),
        ("pipeline.schedule", "pipeline: {signal: layers, axis: stage, microbatches: 2, schedule: URL}"),
    ],
)
@pytest.mark.parametrize("url", ["s3://bucket/x.csv", "gs://bucket/x", "file:///tmp/x"])
def test_a_url_is_no_path(write, refused, key, text, url):
    path = write("run.yaml", text.replace("URL", url))
    line = 2 if key == "rules" else 1
    why = f"'{url}' is a URL, but jgt reads and writes files only. Copy it to a disk, or mount it as a folder, and give that path"
    assert f"{path}:{line}: {key}: {why}" in refused(path)


def test_not_utf8(tmp_path, refused):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run:\n  name: \xff\n")
    assert_found(refused(path), f"{path}:2: not UTF-8: byte 0xff at offset 13. Save the file as UTF-8")


# -- with JAX ----------------------------------------------------------------------------------------------------


def test_all_that_does_not_divide_comes_at_once_with_what_is_wrong_in_the_data(write, refused, tmp_path):
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    path = write(
        "run.yaml",
        f"""
        run: {{dir: {tmp_path}/run}}
        model: {{layers: 2, embed: 30, heads: 3, ffn: 62, vocab: 255, seq: 33}}
        mesh: {{data: 2, tensor: 4}}
        rules: rules.yaml
        data: {{source: tokens, path: {tmp_path}/tokens.bin, eval_tokens: 20}}
        train: {{batch: 7, uneven: refuse}}
        """,
    )
    rules = write(
        "rules.yaml",
        """
        inputs: [data, tensor]
        signals:
          layers/mlp:
            params: {up_proj/kernel: [null, tensor]}
            tensors: {hidden: [null, null, tensor]}
          layers:
            out: [data, null, null]
        default: replicate
        """,
    )
    problems = refused(path)
    for expected in (
        f"{path}:6: train.batch: {rules}:1: inputs: dim 0 of the input batch [7, 33] has size 7, which data=2 "
        f"does not divide. A size of 6 or 8 would fit, or data of 1",
        f"{path}:2: model.seq: {rules}:1: inputs: dim 1 of the input batch [7, 33] has size 33, which tensor=4 "
        f"does not divide. A size of 32 or 36",
        f"{rules}:4: up_proj/kernel: dim 2 of the parameter layers/mlp/up_proj/kernel [2, 30, 62] has size 62, "
        "which tensor=4 does not divide. A size of 60 or 64 would fit, or tensor of 1, 2",
        f"{rules}:5: hidden: dim 2 of the tensor hidden at layers/mlp [7, 33, 62] has size 62, which tensor=4 does not divide",
        f"{path}:2: {tmp_path}/tokens.bin: token 255 is 255, but the vocabulary has 255 ids (0 to 254). Set model.vocab=300, or",
    ):
        assert sum(expected in problem for problem in problems) == 1, (expected, problems)
    # What follows from the batch is not repeated.
    assert not any("has size 7, which" in problem for problem in problems if "train.batch" not in problem)
    assert not (tmp_path / "run").exists()


def test_accumulation_divides_the_batch_before_the_mesh_does(tiny_file, refused, tmp_path):
    mesh = ("mesh={data: 8}", "rules={axes: {batch: [data]}, default: replicate}")
    problems = refused(tiny_file, f"run.dir={tmp_path}/run", *mesh, "train.batch=16", "train.accumulate=4")
    assert "train.batch: " in problems[0]
    assert "dim 0 of the input batch / accumulate 4 [4, 32] has size 4, which data=8 does not divide" in problems[0]


def test_rules_that_decide_nothing(write, refused, tiny_file, tmp_path):
    rules = write(
        "rules.yaml",
        """
        signals:
          embd: {out: [data, null, null]}
          head:
            params: {bias: [data]}
            tensors: {logit: [data, null, null]}
          embed: {out: [data, null]}
          layers/*: {out: [data, null, null]}
          layers/attn: {out: [null, null, null]}
          layers/mlp: {params: {"*/kernel": [null, null, data]}}
        """,
    )
    problems = refused(tiny_file, f"run.dir={tmp_path}/run", "mesh={data: 8}", f"rules={rules}")
    unmatched = [problem for problem in problems if "no rule matches this parameter" in problem]
    assert len(unmatched) == 9
    assert f"{rules}:1: embed/embedding: no rule matches this parameter of shape [256, 32], used under embed. Add a pattern" in unmatched[0]
    longer = [problem for problem in problems if "the spec has 3 dims" in problem]
    assert len(longer) == 3
    assert f"{rules}:9: */kernel: the spec has 3 dims, but the parameter layers/mlp/down/kernel has 2" in longer[0]
    assert_found(
        [problem for problem in problems if problem not in (*unmatched, *longer)],
        f"{rules}:2: embd: no signal of the program matches. Did you mean 'embed'?",
        f"{rules}:4: head: params: bias: no parameter used below this signal matches",
        f"{rules}:5: head: tensors: logit: no tensor of that name below this signal",
        f"{rules}:6: embed: out: the floating values that leave this signal have rank 3, none has the 2 dims of this spec",
        f"{rules}:8: layers/attn: out: shadowed: all that it matches is taken by the rule at {rules}:7",
    )


def test_a_mesh_that_does_not_use_all_devices(tiny_file, refused, tmp_path):
    overrides = ("mesh={data: 3}", "rules={axes: {batch: [data]}, default: replicate}")
    assert_found(
        refused(tiny_file, f"run.dir={tmp_path}/run", *overrides),
        "mesh={data: 3}: mesh: data=3 = 3 devices, but there are 8. Make the product 8, or one size -1. JAX has found no GPU: "
        "install it with pip install 'jgt[gpu]', or set devices.virtual_cpu=3 for a trial on CPUs",
    )


def test_a_split_without_a_window(tiny_file, refused, tmp_path):
    (problem,) = refused(tiny_file, f"run.dir={tmp_path}/run", "data.eval_tokens=20")
    assert problem.startswith("command line: data.eval_tokens=20: data.eval_tokens: 20 of the ")
    assert "cannot be held out: one window of seq 32 needs 33. Set data.eval_tokens to a number from 33 to " in problem
    (problem,) = refused(tiny_file, f"run.dir={tmp_path}/run", "data.eval_tokens=1000000")
    assert "or to 0 for no evaluation, or remove the key, which holds out" in problem


def test_values_that_would_do_are_named_with_the_line_of_their_key(write, refused, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"content": "some text", "n": 1}\n' * 300)
    texts = "{source: jsonl, path: PATH/*.jsonl, field: body}".replace("PATH", str(tmp_path))
    path = write("run.yaml", f"model: {{layers: 1, embed: 8, heads: 2, seq: 4}}\ndata: {texts}\n")
    missing = "a.jsonl:1: has no field 'body' (and 19 or more others). It has: 'content', 'n'. Set data.field=content"
    (problem,) = refused(path, f"run.dir={tmp_path}/run")
    assert problem == f"{path}:2: {tmp_path}/{missing}"
    (problem,) = refused(path, f"run.dir={tmp_path}/run", "data.field=body")
    assert problem == f"command line: data.field=body: {tmp_path}/{missing}"
    part = texts.replace("{source", "{weight: 1, source")
    path = write("mixed.yaml", f"model: {{layers: 1, embed: 8, heads: 2, seq: 4}}\ndata:\n  source: mixture\n  mixture:\n  - {part}\n")
    (problem,) = refused(path, f"run.dir={tmp_path}/run")
    assert problem.startswith(f"{path}:5: ")
    assert problem.endswith("Set field: content in data.mixture[0]")


def test_a_name_to_keep_is_a_tensor_of_the_model(write, refused):
    path = write("run.yaml", "train: {remat: [head, hidden]}")
    assert refused(path) == [f"{path}:1: train.remat: the model has no tensor 'head'. Did you mean 'heads'?"]


def test_gradients_in_another_type_than_they_have(write, refused):
    path = write("run.yaml", "optimizer: {gradients: bf16}")
    text = "bf16 needs model.dtype: bf16. Gradients of f32 matmuls are f32"
    assert refused(path) == [f"{path}:1: optimizer.gradients: {text}"]
