"""Several adapters on one model: each answers as it does alone, and they share the model's arrays and the compiled programs."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jgt
from jgt import path_text
from jgt.document import InputError
from train.commands import generate
from train.commands.published import export
from train.config import load
from train.run.load import load_writer
from train.run.train import train
from train.weights.adapters import CONFIG, TENSORS
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

GOLDENS = Path(__file__).parents[2] / "goldens"
MODEL, FIRST = GOLDENS / "weights" / "llama", GOLDENS / "adapters" / "llama"
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11]]
KEYS = {"tokens": 12, "temperature": 0.7, "seed": 3}


def other(folder, *, rank=4, without="nothing", **changes):
    """Another adapter of the model of FIRST, with random factors. without: a module that it does not adapt."""
    opened, draw = open_folder(FIRST, single=TENSORS), np.random.default_rng(rank)
    shapes = {name: tuple(rank if n == 4 else n for n in x.shape) for name, x in opened.tensors.items() if without not in name}
    tensors = {name: (draw.normal(size=shape) / 3).astype(np.float32) for name, shape in shapes.items()}
    config = json.loads((FIRST / CONFIG).read_text()) | {"r": rank, "lora_alpha": 5} | changes
    kinds = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    pieces = ((name, (), x) for name, x in tensors.items())
    write_folder(folder, kinds, pieces, files={CONFIG: json.dumps(config).encode()}, max_file_bytes=10**9, single=TENSORS)
    return folder


@pytest.fixture
def adapters(tmp_path):
    """Two of one rank and pattern, whose factors count differently, and one of another rank and pattern."""
    return {"a": FIRST, "b": other(tmp_path / "b"), "c": other(tmp_path / "c", rank=2, without="v_proj")}


def test_each_answers_as_alone_with_the_same_programs_and_arrays(adapters):
    together = load_writer(str(MODEL), [], [], adapters)
    programs, compiled, shared = together.generator._programs, {}, []
    for name, folder in adapters.items():
        answers = together.adapted(name).generate(PROMPTS, **KEYS)
        compiled[name] = programs.read._cache_size(), programs.enter._cache_size(), programs.write._cache_size()
        alone = load_writer(str(MODEL), [], [], {"alone": folder}).generate(PROMPTS, **KEYS)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
        for answer, expected in zip(answers, alone, strict=True):
            np.testing.assert_allclose(answer.logprobs, expected.logprobs, rtol=0, atol=1e-6)
        params = together.adapted(name).generator._arrays[0]
        shared.append([x for path, x in jax.tree.leaves_with_path(params) if "lora_" not in path_text(path)])
    assert compiled["b"] == compiled["a"]
    # A rank of its own has programs of its own, which the parts without parameters are not.
    assert compiled["c"] == (2 * compiled["a"][0], compiled["a"][1], 2 * compiled["a"][2])
    assert all(x is y for of_other in shared[1:] for x, y in zip(shared[0], of_other, strict=True))


@pytest.mark.parametrize("layout", [{}, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rules": "jgt:fsdp_tensor"}], ids=["alone", "mesh"])
def test_the_logits_are_those_of_each_adapter_alone(adapters, layout):
    tokens = np.random.default_rng(1).integers(3, 64, (2, 32))
    together = jgt.load(MODEL, adapters=adapters, **layout)
    base = np.asarray(jgt.load(MODEL).logits(tokens))
    for name, folder in adapters.items():
        logits, alone = (np.asarray(loaded.logits(tokens)) for loaded in (together.adapted(name), jgt.load(MODEL, [f"lora.hf={folder}"])))
        assert np.abs(alone - base).max() > 0.1
        # A layout and the place of a factor's scale change the rounding.
        np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-4)
        if not layout:
            np.testing.assert_allclose(logits, jgt.load(MODEL, adapters={"x": folder}).logits(tokens), rtol=0, atol=1e-6)


def lines(file, *prompts):
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(file)


def test_a_prompt_is_answered_by_the_adapter_that_it_names_or_by_all(adapters, tmp_path, capsys):
    file = lines(tmp_path / "prompts", {"tokens": PROMPTS[0]}, {"tokens": PROMPTS[1], "adapter": "b"})
    given = [f"--adapter=a={adapters['a']}", f"--adapter={adapters['b']}"]
    assert generate.main([str(MODEL), *given, "--prompts", file, "--json", "--tokens", "6", "--temperature", "0"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(answer["adapter"], answer["prompt"]) for answer in answers] == [("a", 0), ("b", 0), ("b", 1)]
    alone = load_writer(str(MODEL), [], [], {"b": adapters["b"]}).generate(PROMPTS, tokens=6, temperature=0)
    assert [answer["tokens"] for answer in answers[1:]] == [answer.tokens for answer in alone]


def test_all_that_is_wrong_is_reported_at_once(adapters, tmp_path, capsys):
    file = lines(tmp_path / "prompts", {"tokens": [1], "adapter": "aa"}, {"tokens": [1], "adapter": "zzz"}, {"x": 1})
    named = [f"--adapter=aaa={adapters['a']}", f"--adapter=b={adapters['b']}", "--adapter=b=x"]
    assert generate.main([str(MODEL), *named, "--prompts", file]) == 2
    said = capsys.readouterr().err
    assert f"--adapter b=x: {adapters['b']} has the name b, too. Write --adapter NAME=x" in said
    assert "prompts:1: adapter: 'aa' is not given. Did you mean 'aaa'?" in said
    assert "prompts:2: adapter: 'zzz' is not given. Known: aaa, b." in said
    assert "prompts:3: is not a JSON object" in said
    assert generate.main([str(MODEL), *named[:2], "--chat"]) == 2
    assert "--chat without prompts talks with one adapter, not with aaa and b. Give one" in capsys.readouterr().err


def test_adapters_that_do_not_fit_are_reported_together(adapters, tmp_path):
    dora, gone = other(tmp_path / "dora", use_dora=True), tmp_path / "gone"
    wide = other(tmp_path / "wide", without="down_proj")
    opened = open_folder(wide, single=TENSORS)
    tensors = {name: np.zeros((4, 48) if name.endswith("lora_A.weight") else x.shape, np.float32) for name, x in opened.tensors.items()}
    kinds = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    pieces, files = ((name, (), x) for name, x in tensors.items()), {CONFIG: (wide / CONFIG).read_bytes()}
    write_folder(tmp_path / "wider", kinds, pieces, files=files, max_file_bytes=10**9, single=TENSORS)
    foreign, based = GOLDENS / "adapters" / "gpt2", other(tmp_path / "based")
    (based / "jgt_base.json").write_text('{"sha256": "0"}')
    given = {"a": adapters["a"], "d": dora, "g": gone, "w": tmp_path / "wider", "f": foreign, "o": based}
    with pytest.raises(InputError) as raised:
        load_writer(str(MODEL), [], [], given)
    problems = [
        "dora/adapter_config.json: use_dora",
        "gone: cannot be read",
        "A has the shape [4, 48], but the model needs [4, 32]. Is it an adapter of another model?",
        "c_attn: is not a module of the model",
        "based/jgt_base.json: the adapter was trained on other weights",
    ]
    assert [problem for problem in problems if problem not in str(raised.value)] == []
    with pytest.raises(InputError, match=r"is not a folder of Hugging Face, so it takes no other adapters"):
        jgt.load(run_folder(tmp_path), adapters=adapters)


def run_folder(folder):
    """A run directory without a checkpoint."""
    (folder / "config.yaml").write_text("model: {seq: 16}\n")
    return folder


@pytest.mark.slow
def test_a_run_is_an_adapter_too(tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(3, 64, 8000, np.uint16))
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "mesh": {"data": 1},
        "model": {"hf": str(MODEL), "seq": 32},
        "data": {"source": "tokens", "path": str(tmp_path / "tokens.npy"), "eval_tokens": 0},
        "lora": {"rank": 3, "alpha": 7},
        "optimizer": {"lr": 0.05, "schedule": "constant"},
        "train": {"batch": 8, "steps": 4},
    }
    train(load(sections))
    assert export([str(tmp_path / "run"), str(tmp_path / "folder"), "--adapter"]) == 0
    loaded = load_writer(str(MODEL), [], [], {"run": tmp_path / "run", "folder": tmp_path / "folder"})
    run, folder = (loaded.adapted(name).generate(PROMPTS, **KEYS) for name in ("run", "folder"))
    assert run == folder
    assert run != jgt.load(MODEL).generate(PROMPTS, **KEYS)
    train(load(sections, ["lora=null", f"run.dir={tmp_path / 'plain'}", "train.steps=1"]))
    with pytest.raises(InputError, match=r"plain: is a run that trains no adapter"):
        load_writer(str(MODEL), [], [], {"plain": tmp_path / "plain"})
