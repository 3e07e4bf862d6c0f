"""Runs with adapters: they begin from another run's parameters, resume with the same bits, and are loaded, also on other meshes."""

import jax
import numpy as np
import pytest

import jgt
from jgt import path_text
from jgt.document import InputError
from train.run.directory.identity import check_adapters, fingerprints
from train.run.train import train

LORA = 'lora={rank: 4, alpha: 8, modules: ["{q,k,v}_proj", out], dropout: 0.1}'
FSDP = ("rules=jgt:fsdp", "mesh={fsdp: 8}")


def flat(tree):
    return {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), FSDP], ids=["alone", "fsdp"])
def test_adapters_begin_at_another_run_and_resume(tiny, tmp_path, stopped_at, layout):
    train(tiny("train.steps=3", f"run.dir={tmp_path / 'base'}", *layout))
    overrides = (LORA, "train.steps=4", "checkpoint.every=2", f"checkpoint.weights={tmp_path / 'base'}", "optimizer.lr=0.03", *layout)
    with stopped_at(3):
        train(tiny(*overrides))
    train(tiny(*overrides))
    train(tiny(*overrides, f"run.dir={tmp_path / 'whole'}"))
    base, run, whole = (jgt.load(tmp_path / name) for name in ("base", "run", "whole"))
    first, last = flat(base.params), flat(run.params)
    for path, x in flat(whole.params).items():
        np.testing.assert_array_equal(last[path], x, err_msg=path)
        np.testing.assert_array_equal(x, first.get(path, x), err_msg=path)
    assert last.keys() - first.keys() == {f"layers/attn/{m}/lora_{f}" for m in ("q_proj", "k_proj", "v_proj", "out") for f in "ab"}
    tokens = np.arange(16)[None]
    np.testing.assert_allclose(run.model(tokens), run.logits(tokens), atol=2e-5)
    assert np.max(np.abs(run.logits(tokens) - base.logits(tokens))) > 1e-2
    # One token at a time, with a cache, as all at once.
    (answer,) = run.generate([[1, 2, 3]], tokens=4, temperature=0)
    longer = [1, 2, 3, *answer.tokens[:-1]]
    assert [int(n) for n in np.argmax(run.logits([longer])[0, 2:], -1)] == list(answer.tokens)


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ("null", r"lora is \{.* there and null here\. Write the same lora section, or begin with the model that jgt export --merge writes"),
        (LORA.removeprefix("lora=").replace("alpha: 8", "alpha: 16"), "lora.alpha is 8.0 there and 16.0 here"),
        (LORA.removeprefix("lora=").replace(", out", ""), "lora.modules is .* there and .* here"),
    ],
)
def test_adapters_are_not_left_out_or_read_differently(tiny, tmp_path, lora, problem):
    before = fingerprints(tiny(LORA), {})
    check_adapters(tiny(LORA.replace("dropout: 0.1", "dropout: 0")), before, tmp_path)
    check_adapters(tiny(LORA), fingerprints(tiny(), {}), tmp_path)
    with pytest.raises(InputError, match=problem):
        check_adapters(tiny(f"lora={lora}"), before, tmp_path)
