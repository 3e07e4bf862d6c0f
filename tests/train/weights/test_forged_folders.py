"""Forged folders of Hugging Face: `jgt inspect` and `jgt check` refuse each with a line that names the file and what is wrong in it.

A case changes a whole folder. Nothing outside of the folder is read, nothing in it is executed, and no case needs a second.
"""

import io
import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from hostile import Trap, assert_lines, watched
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jgt.document import InputError
from train.run.__main__ import check, inspect
from train.weights.described import described_by
from train.weights.safetensors import INDEX, SINGLE

ROOT = Path(__file__).parents[3]
GOLDENS = ROOT / "tests" / "goldens" / "weights"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
}
PART = "model.layers.0."
TENSORS = {
    "model.embed_tokens.weight": [16, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [16, 8],
    PART + "input_layernorm.weight": [8],
    PART + "post_attention_layernorm.weight": [8],
    PART + "self_attn.q_proj.weight": [8, 8],
    PART + "self_attn.k_proj.weight": [4, 8],
    PART + "self_attn.v_proj.weight": [4, 8],
    PART + "self_attn.o_proj.weight": [8, 8],
    PART + "mlp.gate_proj.weight": [12, 8],
    PART + "mlp.up_proj.weight": [12, 8],
    PART + "mlp.down_proj.weight": [8, 12],
}


def file_of(tensors, dtype="F32", size=4):
    """The bytes of a file with tensors of these shapes."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return of_header(json.dumps(header).encode(), bytes(end))


def of_header(text, data=b"", length=None):
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def make(folder):
    """A sound folder, and a run's file beside it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / SINGLE).write_bytes(file_of(TENSORS))
    (folder.parent / "run.yaml").write_text("mesh: {fsdp: 2}\nrules: jgt:fsdp\ndata: {source: stdlib}\ntrain: {batch: 2}\n")
    (folder.parent / "outside").write_bytes(file_of(TENSORS))
    return folder


# -- cases: a change of the folder, and words that a message has ---------------------------------------------------


def config(message, **changes):
    """Another config.json. None takes a key away."""
    return lambda folder: write(folder, {**LLAMA, **changes}), f"config.json{message}"


def family(name, message, **changes):
    """The config.json of a golden folder, changed."""
    values = json.loads((GOLDENS / name / "config.json").read_text())
    return lambda folder: write(folder, {**values, **changes}), f"config.json{message}"


def write(folder, values):
    (folder / "config.json").write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def text(message, content):
    """A config.json with these bytes."""
    return lambda folder: (folder / "config.json").write_bytes(content), f"config.json: {message}"


def whole(name, message, **values):
    """A golden folder with other values in its config.json."""
    change, _ = family(name, message, **values)

    def changed(folder):
        change(folder)
        (folder / SINGLE).write_bytes((GOLDENS / name / SINGLE).read_bytes())

    return changed, message


def tensors(message, changes):
    """Tensors of other shapes; None takes one away."""
    made = {name: shape for name, shape in {**TENSORS, **changes}.items() if shape is not None}
    return lambda folder: (folder / SINGLE).write_bytes(file_of(made)), message


def data(message, content):
    """The bytes of model.safetensors."""
    return lambda folder: (folder / SINGLE).write_bytes(content), f"{SINGLE}: {message}"


def index(message, weight_map, **files):
    """An index in the place of the file, and other files."""

    def change(folder):
        (folder / SINGLE).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        for name, content in files.items():
            (folder / f"{name}.safetensors").write_bytes(content)

    return change, message


def link(name, target, message):
    """A file that is a link."""

    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change, message


def instead(name, put, message):
    def change(folder):
        (folder / name).unlink()
        put(folder)

    return change, message


def nested(depth, inner=b"1"):
    return b'{"model_type": "llama", "rope_scaling": ' + b'{"a":' * depth + inner + b"}" * depth + b"}"


DEEP = json.loads("[" * 400 + "]" * 400)
ONE = {"model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}
FIRST = "model.embed_tokens.weight"
CASES = {
    # config.json: not JSON, or not of this kind
    "no config": instead("config.json", lambda folder: None, "config.json: cannot be read: No such file"),
    "config that is a folder": instead(
        "config.json", lambda folder: (folder / "config.json").mkdir(), "config.json: cannot be read: it is"
    ),
    "config that is a pipe": instead("config.json", lambda folder: os.mkfifo(folder / "config.json"), "it is a named pipe"),
    "empty config": text("is not valid JSON", b""),
    "config that is a list": text("is not a mapping", b"[1]"),
    "config that is null": text("is not a mapping", b"null"),
    "config that is a pickle": text("is not valid JSON", pickle.dumps(Trap())),
    "config in UTF-16": text("is not valid JSON", json.dumps(LLAMA).encode("utf-16")),
    "config cut short": text("is not valid JSON", json.dumps(LLAMA).encode()[:-5]),
    "config with a key twice": text("is not valid JSON: 'vocab_size' is given twice", b'{"vocab_size": 1, "vocab_size": 2}'),
    "config of 20 MB": text("the file is larger than", b'{"a": "' + b"x" * 20_000_000 + b'"}'),
    "config nested 100,000 times": text("is not valid JSON: it is nested too deeply", nested(100_000)),
    "config nested 900 times": text("", nested(900)),
    "config nested 400 times": text("", nested(400)),
    "config with lists nested 400 times": config("", rope_theta=DEEP),
    "unknown key nested 400 times": config(": twist: ", twist=DEEP),
    "number of 5,000 digits": text("is not valid JSON: Exceeds the limit", b'{"vocab_size": ' + b"1" * 5_000 + b"}"),
    "100,000 unknown keys": text("x0: 1: jgt does not know", json.dumps(LLAMA | {f"x{n}": 1 for n in range(80_000)}).encode()),
    # config.json: values
    "no model_type": config(": model_type: null is not known", model_type=None),
    "model_type that is a list": config(": model_type: ['llama'] is not known", model_type=["llama"]),
    "model_type that is a path": config(": model_type: '../llama' is not known", model_type="../llama"),
    "model_type that a terminal obeys": config(r": model_type: '\x1b[2J' is not known", model_type="\x1b[2J"),
    "no hidden_size": config(": the key 'hidden_size' is missing", hidden_size=None),
    "no layers": config(": the key 'num_hidden_layers' is missing", num_hidden_layers=None),
    "no heads": config(": the key 'num_attention_heads' is missing", num_attention_heads=None),
    "text as layers": config(": num_hidden_layers must be a number above 0, not 'two'", num_hidden_layers="two"),
    "list as layers": config(": num_hidden_layers must be a number above 0, not [1]", num_hidden_layers=[1]),
    "true as layers": config(": num_hidden_layers must be a number above 0, not true", num_hidden_layers=True),
    "negative layers": config(": num_hidden_layers must be a number above 0, not -1", num_hidden_layers=-1),
    "layers and a half": config(":1: model.layers: must be a whole number", num_hidden_layers=1.5),
    "10^12 layers": config(":1: model.layers: 1000000000000 is too large", num_hidden_layers=10**12),
    "10^12 layers with windows": family("gemma2", ": num_hidden_layers: 1000000000000 is not a number of layers", num_hidden_layers=10**12),
    "10^12 layers, some without positions": family("smollm3", ": num_hidden_layers: 1000000000000 is not", num_hidden_layers=10**12),
    "NaN as width": text("hidden_size must be a number above 0, not nan", json.dumps(LLAMA | {"hidden_size": float("nan")}).encode()),
    "infinite width": text("hidden_size must be a number above 0, not inf", json.dumps(LLAMA | {"hidden_size": float("inf")}).encode()),
    "width of 400 digits": config(": hidden_size must be a number above 0, not 1000", hidden_size=10**400),
    "width of zero": config(": hidden_size must be a number above 0, not 0", hidden_size=0),
    "heads that do not divide the width": config(":1: model.heads: embed 8 is not divisible by heads 3", num_attention_heads=3),
    "key heads that do not divide the heads": config(":1: model.kv_heads: heads 2 is not divisible", num_key_value_heads=5),
    "negative key heads": config(": num_key_value_heads must be a number above 0, not -2", num_key_value_heads=-2),
    "odd heads": config(":1: model.head_dim: RoPE rotates pairs", head_dim=3),
    "head of 10^9": config(":1: model.head_dim: 1000000000 is too large", head_dim=10**9),
    "vocabulary of 10^15": config(":1: model.vocab: ", vocab_size=10**15),
    "negative vocabulary": config(": vocab_size must be a number above 0, not -16", vocab_size=-16),
    "text as epsilon": config(": rms_norm_eps must be a number above 0, not '1e-5'", rms_norm_eps="1e-5"),
    "negative epsilon": config(": rms_norm_eps must be a number above 0, not -1", rms_norm_eps=-1),
    "text as tied": config(": tie_word_embeddings must be true or false, not 'yes'", tie_word_embeddings="yes"),
    "number as activation": config(": hidden_act must be a text, not 3", hidden_act=3),
    "unknown activation": config(": hidden_act: 'os.system' is not supported", hidden_act="os.system"),
    "scaling that is a number": config(": rope_scaling must be a mapping, not 8", rope_scaling=8),
    "scaling of unknown kind": config(": rope_scaling: 'spiral' is not supported", rope_scaling={"rope_type": "spiral", "factor": 2.0}),
    "yarn without a length": config(
        ": rope_scaling: the key 'original_max_position_embeddings' is missing", rope_scaling={"rope_type": "yarn", "factor": 2.0}
    ),
    "scaling whose kind is a list": config(": rope_scaling: rope_type must be a text", rope_scaling={"rope_type": []}),
    "scaling without factor": config(": rope_scaling: the key 'factor' is missing", rope_scaling={"rope_type": "linear"}),
    "scaling with text as factor": config(": rope_scaling: factor must be a number", rope_scaling={"rope_type": "linear", "factor": "8"}),
    "scaling by zero": config(": rope_scaling: factor must be a number above 0, not 0", rope_scaling={"rope_type": "linear", "factor": 0}),
    "scaling with divisors that are text": config(
        ": rope_scaling: short_factor must be a list of at most 10,000, not 'x'",
        rope_scaling={"rope_type": "longrope", "factor": 2.0, "short_factor": "x", "long_factor": []},
    ),
    "scaling with 100,000 divisors": config(
        ": rope_scaling: short_factor must be a list of at most 10,000, not [1.0",
        rope_scaling={"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 100_000, "long_factor": [1.0]},
    ),
    "two scalings": config(
        ": rope_parameters and rope_scaling say different things",
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "linear", "factor": 4.0},
    ),
    "unknown key": config(": num_sinks: 4: jgt does not know this key", num_sinks=4),
    "quantised": config(": the tensors are quantised (awq)", quantization_config={"quant_method": "awq"}),
    "code for a class that is not known": config(
        ": model_type: 'mine' is not known", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Model"}
    ),
    "types of layers that are a text": family(
        "ministral", ": layer_types must be a list of at most 10,000, not 'full'", layer_types="full"
    ),
    "types of layers that are lists": family("ministral", ": layer_types: [] is not supported", layer_types=[[], []]),
    "types of too many layers": family("ministral", ": layer_types: has 3 entries, but there are 2", layer_types=["full_attention"] * 3),
    "window of zero": family("mistral", ": sliding_window must be a number above 0, not 0", sliding_window=0),
    "window that is a text": family("mistral", ": sliding_window must be a number above 0, not '8'", sliding_window="8"),
    "scale of zero": family("granite", ": logits_scaling must be a number above 0, not 0", logits_scaling=0),
    "scale of a text": family("gemma2", ": query_pre_attn_scalar must be a number above 0, not 'x'", query_pre_attn_scalar="x"),
    "negative scale": family("gemma2", ": query_pre_attn_scalar must be a number above 0, not -4", query_pre_attn_scalar=-4),
    "period of zero": family("gemma3", ": sliding_window_pattern must be a number above 0", sliding_window_pattern=0, layer_types=None),
    "interval that is a list": family("smollm3", ": no_rope_layer_interval must be a number", no_rope_layer_interval=[4]),
    "more choices than experts": family("mixtral", ":1: model.experts", num_experts_per_tok=50),
    "no experts": family("qwen3_moe", ": the key 'num_experts' is missing", num_experts=None, num_local_experts=None),
    "10^9 experts": family("mixtral", ":1: model.experts.count: ", num_local_experts=10**9),
    "share above one": family("stablelm", ":1: model.rope_share: ", partial_rotary_factor=5.0, rope_parameters=None),
    "inner width that is a text": family("gpt2", ": n_inner must be a number above 0, not 'x'", n_inner="x"),
    "latent of no width": family("deepseek_v3", ": the key 'kv_lora_rank' is missing", kv_lora_rank=None),
    "latent that is a text": family("deepseek_v3", ": kv_lora_rank must be a number above 0, not 'x'", kv_lora_rank="x"),
    "latent of 10^9": family("deepseek_v3", ":1: model.latent.rank: 1000000000 is too large", kv_lora_rank=10**9),
    "latent of another width": whole("deepseek_v3", "kv_a_layernorm.weight has the shape [20], but the model needs [21]", kv_lora_rank=21),
    "latent for queries that is a list": family("deepseek_v2", ": q_lora_rank must be a number above 0, not [1]", q_lora_rank=[1]),
    "no latent for queries": family("kimi_k2", ": the key 'q_lora_rank' is missing", q_lora_rank=None),
    "heads without positions": family("deepseek_v3", ": qk_rope_head_dim must be a number above 0, not 0", qk_rope_head_dim=0),
    "an odd number of rotated elements": family(
        "deepseek_v3", ":1: model.latent: RoPE rotates pairs, but rope_dim is the odd number 3", qk_rope_head_dim=3, qk_head_dim=11
    ),
    "latent with fewer key heads": family("deepseek_v3", ": num_key_value_heads: 2 is not supported", num_key_value_heads=2),
    "values that are negative": family("mistral4", ": v_head_dim must be a number above 0, not -8", v_head_dim=-8),
    "growth of scores that is a list": family(
        "deepseek_v3",
        ": rope_parameters: mscale_all_dim must be a number",
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": [1]},
    ),
    "positions that are a list": family("deepseek_v3", ": rope_parameters must be a mapping", rope_parameters=[[1, 2]]),
    "sparse layers first": family("glm4_moe_lite", ": mlp_layer_types: dense layers before", mlp_layer_types=["sparse", "dense", []]),
    "an indexer of a text": family("deepseek_v32", ": index_topk must be a number above 0, not 'all'", index_topk="all"),
    "an indexer of 10^9 tokens": family("glm_moe_dsa", ":1: model.latent.longest: 1000000000 is too large", index_topk=10**9),
    # Tensors that are not the model's
    "a tensor is missing": tensors("the tensor lm_head.weight [16, 8] is missing", {"lm_head.weight": None}),
    "every tensor is missing": data("the header", of_header(b"{}", bytes(4))),
    "another tensor": tensors("the tensor model.layers.0.evil [2] is not part of the model", {PART + "evil": [2]}),
    "another layer": tensors(
        "the tensor model.layers.1.input_layernorm.weight [8] is not part", {"model.layers.1.input_layernorm.weight": [8]}
    ),
    "another shape": tensors("lm_head.weight has the shape [16, 9], but the model needs [16, 8]", {"lm_head.weight": [16, 9]}),
    "another number of dims": tensors("the tensor model.norm.weight has the shape [8, 1]", {"model.norm.weight": [8, 1]}),
    "transposed": tensors("mlp.down_proj.weight has the shape [12, 8], but", {PART + "mlp.down_proj.weight": [12, 8]}),
    "a scalar": tensors("the tensor model.norm.weight has the shape []", {"model.norm.weight": []}),
    "a name that a terminal obeys": tensors(r"the tensor \x1b[2J [1] is not part", {"\x1b[2J": [1]}),
    "a larger model": (config("", num_hidden_layers=40)[0], "the tensor model.layers.39.input_layernorm.weight [8] is missing"),
    "a model of 10^18 parameters": (config("", hidden_size=10**6, num_hidden_layers=10**4, intermediate_size=10**7)[0], "has the shape"),
    "whole numbers": (lambda folder: (folder / SINGLE).write_bytes(file_of(TENSORS, "I32")), "has tensors of the type int32"),
    "complex numbers": (lambda folder: (folder / SINGLE).write_bytes(file_of(TENSORS, "C64", 8)), "has tensors of the type complex64"),
    # Files
    "length of the header": data("its header has 1,000,000 bytes", of_header(b"{}", length=1_000_000)),
    "overlap": data(
        "a: data_offsets: begins at byte 0",
        of_header(json.dumps({**ONE, "a": ONE["model.norm.weight"]}).encode(), bytes(32)),
    ),
    "offsets outside of the file": data("model.norm.weight: data_offsets: the tensors end", of_header(json.dumps(ONE).encode(), bytes(4))),
    "a tensor twice": data("is not valid JSON: 'a' is given twice", of_header(b'{"a": {}, "a": {}}')),
    "no number as type": data(
        "model.norm.weight: dtype: 'O' is not read", of_header(json.dumps(ONE).replace("F32", "O").encode(), bytes(32))
    ),
    "a million tensors": data("has at least 249,750 tensors", of_header(b"{" + b",".join(b'"%d":{}' % n for n in range(10**6)) + b"}")),
    "300,000 tensors": (
        lambda folder: (folder / SINGLE).write_bytes(many(300_000)),
        f"{SINGLE}: its header has 19,766,676 bytes",
    ),
    "100,000 tensors": (lambda folder: (folder / SINGLE).write_bytes(many(100_000)), f"{SINGLE}: has at least 99,750 tensors"),
    "only a pickle": instead(SINGLE, lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap())), "a pickle. Convert"),
    "a pickle by another name": data("its header has", pickle.dumps(Trap())),
    "index above the folder": index(f"{INDEX}: {FIRST}: its file is '../outside'", {FIRST: "../outside"}),
    "index with ../ and the right ending": index("its file is '../x.safetensors'", {FIRST: "../x.safetensors"}),
    "index with an absolute path": index("its file is '/etc/passwd'", {FIRST: "/etc/passwd"}),
    "index to a pickle": index("its file is 'pytorch_model.bin'", {FIRST: "pytorch_model.bin"}),
    "index to nothing": index("b.safetensors: cannot be read: No such file", {FIRST: "b.safetensors"}),
    "index that promises more": index(
        f"{INDEX}: extra: is not in a.safetensors", {**dict.fromkeys(TENSORS, "a.safetensors"), "extra": "a.safetensors"}
    ),
    "index with a tensor in two files": index(
        "b.safetensors: model.norm.weight: is also in a.safetensors",
        {FIRST: "a.safetensors", "model.norm.weight": "b.safetensors"},
        b=file_of({"model.norm.weight": [8]}),
    ),
    "index that is a list": index("weight_map: is not a mapping", []),
    # Links
    "config leads out": link("config.json", "../run.yaml", "config.json: leads to"),
    "config leads to a device": link("config.json", "/dev/zero", "config.json: leads to /dev/zero, outside of the folder"),
    "file leads out": link(SINGLE, "../outside", f"{SINGLE}: leads to"),
    "file leads out by an absolute path": link(SINGLE, "/etc/passwd", f"{SINGLE}: leads to /etc/passwd, outside"),
    "file leads to itself": link(SINGLE, SINGLE, f"{SINGLE}: cannot be read: Too many levels"),
    "tokenizer leads out": link("tokenizer.json", "/etc/passwd", "tokenizer.json: leads to /etc/passwd, outside"),
}


def many(count):
    entries = (b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (n, n, n + 1) for n in range(count))
    return of_header(b"{" + b",".join(entries) + b"}", bytes(count))


NO_RUN = {"tokenizer leads out"}
"""Cases that concern a run alone."""
SLOW = [name for n, name in enumerate(CASES) if n % 8]


def called(command, folder):
    """The exit code, stdout and lines on stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [str(folder)] if command is inspect else [str(folder.parent / "run.yaml"), f"model.hf={folder}"]
    with redirect_stdout(out), redirect_stderr(err):
        code = command(arguments)
    return code, out.getvalue(), err.getvalue().splitlines()


@pytest.fixture(scope="module", autouse=True)
def is_warm(tmp_path_factory):
    """JAX has compiled what a check runs."""
    called(check, make(tmp_path_factory.mktemp("warm") / "model"))


def test_a_sound_folder_is_accepted(tmp_path):
    folder = make(tmp_path / "model")
    for command in (inspect, check):
        code, _, lines = called(command, folder)
        assert (code, lines) == (0, [])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_a_forged_folder_is_refused(name, tmp_path):
    change, message = CASES[name]
    change(folder := make(tmp_path / "model"))
    for command in (check,) if name in NO_RUN else (inspect, check):
        started = time.process_time()
        with watched(folder) as watch:
            code, out, lines = called(command, folder)
        assert (code, out) == (2, ""), lines
        assert_lines(lines)
        assert any(message in line for line in lines), lines[:3]
        assert not {"outside", "passwd", "zero"} & {Path(path).name for path in watch.opened}
        assert time.process_time() - started < 2


def run(command, folder):
    """A command in a process of its own, and the CPU-seconds that it took."""
    arguments = [str(folder)] if command == "inspect" else [str(folder.parent / "run.yaml"), f"model.hf={folder}"]
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "jgt", command, *arguments], capture_output=True, text=True, cwd=folder.parent, timeout=120
    )
    after = os.times()
    return done, after.children_user + after.children_system - before.children_user - before.children_system


@pytest.fixture(scope="module")
def seconds(tmp_path_factory):
    """The CPU-seconds of each command for a sound folder."""
    folder = make(tmp_path_factory.mktemp("sound") / "model")
    return {command: run(command, folder)[1] for command in ("inspect", "check")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_real_commands_refuse_it_as_soon_as_they_have_started(name, tmp_path, seconds):
    change, message = CASES[name]
    change(folder := make(tmp_path / "model"))
    for command in ("check",) if name in NO_RUN else ("inspect", "check"):
        done, taken = run(command, folder)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr[-2000:]
        assert message in done.stderr and "Traceback" not in done.stderr
        assert taken < seconds[command] + 1
        assert not (tmp_path / "canary").exists()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_of_any_key_is_read_or_refused(draw):
    name = draw.draw(st.sampled_from(sorted(folder.name for folder in GOLDENS.iterdir())))
    values = json.loads((GOLDENS / name / "config.json").read_text())
    for key in draw.draw(st.lists(st.sampled_from(sorted(values.keys() - {"model_type"})), min_size=1, max_size=3)):
        values[key] = draw.draw(ANY)
    try:
        described_by(values, Path("config.json"))
    except InputError as error:
        assert_lines(error.problems)
