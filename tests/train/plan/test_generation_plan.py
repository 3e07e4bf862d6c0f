"""`jgt plan --generate`: bytes and times against arithmetic, what it takes for a model, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from plugin import needs_plugin

from jgt import document
from train.plan.__main__ import main

CONFIGS = Path(__file__).parents[3] / "configs"
PUBLISHED = yaml.safe_load((Path(__file__).parents[2] / "goldens" / "published_models.yaml").read_text())
MODEL = {"kind": "llama", "layers": 3, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64, "seq": 128}
RUN = {
    "model": {**MODEL, "window": 20, "full_layers": [1]},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "rules": "jgt:fsdp_tensor",
    "data": {"source": "text", "path": "gone.txt"},
    "train": {"steps": 1, "batch": 8},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(document.dump(RUN))


def planned(capsys, *arguments):
    code, captured = main([*arguments, "--generate", "--json"]), capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_a_cache_has_the_bytes_of_its_formula_on_each_device(capsys):
    found = planned(capsys, "run.yaml", "--batch", "6", "--length", "50")
    # Rows are split over 4 devices, heads over 2; the layer without a window has 64 slots, each of the others 20.
    assert (found["batch"], found["slots"], found["length"], found["prompt_length"]) == (8, 64, 50, 25)
    assert found["cache_bytes"] == found["cache_formula_bytes"] == 8 // 4 * (64 + 2 * 20) * 2 * (4 // 2) * 8 * 4 + 4
    assert found["rules"].startswith("jgt:fsdp_tensor, with parameters that are not split over fsdp")
    # Nothing is gathered but scores and drawn tokens, and partial sums are added up over tensor alone.
    largest = {row["kind"]: row["bytes"] for row in sorted(found["token"]["collectives"], key=lambda row: row["bytes"])}
    assert largest["all-reduce"] == 8 // 4 * 32 * 4 and largest.get("all-gather", 0) <= 8 * 64 * 4
    assert {"layers/attn", "layers/mlp"} <= {row["signal"] for row in found["token"]["collectives"]}


def test_a_flag_that_xla_does_not_have_is_a_warning(capsys):
    assert main(["run.yaml", "xla.flags={xla_no_such_flag: 1}", "--generate"]) == 0
    assert "this XLA does not accept --xla_no_such_flag=1; it is left out" in capsys.readouterr().err


def test_a_token_of_one_text_gathers_no_table(capsys):
    found = planned(capsys, "run.yaml", "--batch", "1", "mesh={data: 1, fsdp: 1, tensor: 4}", "--devices", "4", "model.vocab=4096")
    gathered = [row["bytes"] for row in found["token"]["collectives"] if row["kind"] == "all-gather"]
    assert max(gathered) <= 4096 * 4 < 4096 * 32 * 4 // 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--generate", "--length", "129"], "--length 129: a text has at most model.seq 128 tokens. Give fewer, or model.seq=129"),
        (["--generate", "--length", "20", "--prompt-length", "20"], "--prompt-length 20: leaves no room for an answer in --length 20"),
        (["--generate", "--lock", "x", "--sync"], "--lock is about a training step, and cannot be combined with --generate"),
        (["--batch", "4"], "--batch needs --generate"),
        (["--generate", "--search"], "--generate cannot be combined with --search"),
        (["--generate", "generate.rules=none.yaml"], "none.yaml: cannot be read"),
        (["--generate", "--target", "h100:1x4"], "data=2 x fsdp=2 x tensor=2 = 8 devices"),
    ],
)
def test_wrong_input(capsys, arguments, said):
    assert main(["run.yaml", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err


@pytest.mark.slow
def test_a_folder_of_hugging_face_and_a_run_directory(capsys):
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({**PUBLISHED["Llama-3.2-1B"]["config"], "num_hidden_layers": 1, "vocab_size": 256}))
    Path("run").mkdir()
    Path("run/config.yaml").write_text(document.dump(RUN))
    layout = ["--devices", "2", "mesh={data: 2}", "rules=null", "model.seq=128"]
    found = [planned(capsys, path, *layout) for path in ("hf:model", "model/config.json", "run")]
    assert found[0]["token"]["signals"] == found[1]["token"]["signals"] and all(plan["token"]["mesh"] == {"data": 2} for plan in found)
    assert found[0]["cache_bytes"] == 8 // 2 * 128 * 2 * 8 * 64 * 4 + 4


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize(("name", "tensor"), [("llama-8b", 1), ("llama-8b", 8), ("llama-70b", 8)])
def test_a_token_takes_the_time_in_which_its_weights_are_read(capsys, name, tensor):
    layout = ["mesh={data: 1}", "rules=null"] if tensor == 1 else [f"mesh={{data: 1, tensor: {tensor}}}", "rules=jgt:tensor"]
    options = ["--target", f"h100:1x{tensor}", "--batch", "1", "--length", "4096"]
    found = planned(capsys, str(CONFIGS / f"{name}.yaml"), *layout, *options)
    token = found["token"]
    # XLA copies each layer's parameters out of the stack before it multiplies them, so it moves more bytes than the parameters have.
    least, traffic = token["memory"]["groups"]["parameters"], sum(row["hbm_bytes"] for row in token["signals"])
    assert least < traffic < 6 * least
    busy = found["token_ms"] - sum(token["parts_ms"].get(part, 0.0) for part in ("launch", "exposed"))
    assert least / 3352e9 < traffic / 3352e9 < busy / 1e3 < 2 * traffic / 3352e9
    assert found["fits"] and found["cache_bytes"] == found["cache_formula_bytes"]
