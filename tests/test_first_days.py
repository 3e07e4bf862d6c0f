"""Mistakes of the first days with a trainer: each is answered with its place, what is allowed, and what to change."""

import shlex
from pathlib import Path

import jax
import pytest
from flax import nnx

import jgt
from jgt.__main__ import main

RUN = """
run: {name: m}
devices: {virtual_cpu: 8}
model: {kind: llama, layers: 2, embed: 32, heads: 4, kv_heads: 4, ffn: 64, vocab: 256, seq: 32}
mesh: {data: 2, fsdp: 2, tensor: 2}
rules: jgt:fsdp_tensor
data: {source: stdlib, eval_tokens: 2000}
optimizer: {lr: 1e-3, warmup: 2}
train: {steps: 3, batch: 8}
"""
OWN = """
run: {name: own}
model: {kind: "mine:Net"}
data: {source: "mine:data"}
train: {loss: "mine:loss", steps: 2, batch: 8}
"""
MINE = """
def Net(): pass
def data(): pass
def loss(model, batch): pass
"""
CHATS = """{"messages": [{"role": "bot", "content": "hi"}]}
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
"""


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """What a command in a folder with two run files prints, and its exit code."""
    for name, text in {"run.yaml": RUN, "own.yaml": OWN, "mine.py": MINE, "bad.jsonl": CHATS, "plain.txt": "text " * 200}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "runs" / "first" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)

    def _answer(command):
        try:
            code = main(shlex.split(command))
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        return code, output.err if code else output.out

    return _answer


MISTAKES = {
    "check run.yaml lr=1e-3": "lr: unknown key. Did you mean optimizer.lr?",
    "check run.yaml learning_rate=1e-3": "learning_rate: unknown key. Did you mean optimizer.lr?",
    "check run.yaml epochs=3": "epochs: unknown key. Did you mean 'train.epochs'?",
    "check run.yaml batch_size=8": "batch_size: unknown key. Did you mean train.batch?",
    "check run.yaml train.batch=8.5": "train.batch: must be a whole number, not the number 8.5",
    "check run.yaml train.steps=-1": "train.steps: -1 is too small; it must be at least 1",
    "check run.yaml train.batch=6": "data=2 x fsdp=2 (= 4) does not divide. A size of 4 or 8 would fit, or data x fsdp of 1, 2, 3",
    "check run.yaml train.remat=full": "train.remat: 'full' is not one of none, matmuls, attention, block, auto.",
    "check run.yaml model.kind=gpt2": "model.kind: 'gpt2' is not one of llama, gpt. Did you mean 'gpt'?",
    "check run.yaml model.dtype=bfloat16": "model.dtype: 'bfloat16' is not one of f32, bf16. Did you mean 'bf16'?",
    "check run.yaml model.kv_heads=3": "heads 4 is not divisible by kv_heads 3. Use a divisor of 4",
    "check run.yaml optimizer.name=AdamW": "optimizer.name: 'AdamW' is not one of adamw, muon. Did you mean 'adamw'?",
    "check run.yaml optimizer.schedule=linear": "is not one of cosine, wsd, constant. Another one is part of an optimizer of your own",
    "check run.yaml checkpoint.every=10m": "must be a whole number, not the text '10m'. For a number of minutes, set checkpoint.minutes",
    "check run.yaml checkpoint.save_every=10": "checkpoint.save_every: unknown key. Did you mean checkpoint.every?",
    "check run.yaml checkpoint.best=eval_los": "metric 'eval_los'. Did you mean 'eval_loss'? Evaluations have eval_loss",
    "check run.yaml checkpoint.weights=runs/nope": "checkpoint.weights: runs/nope does not exist. Name a run directory",
    "check run.yaml log=wandb": "log: must be a list, not the text 'wandb'. Write [wandb]",
    "check run.yaml \"alerts={command: 'curl x'}\"": "alerts.command: must be a list, not the text 'curl x'. Write [curl, x]",
    "check run.yaml run.dir=S3:/bucket/x": "run.dir: 'S3:/bucket/x' looks like a URL, but is not one. It would begin with s3://. For",
    "check run.yaml data.source=text data.path=gs:/b/x": "data.path: 'gs:/b/x' looks like a URL, but is not one. It would begin with gs://",
    "check run.yaml 'data={source: mixture, sources: []}'": "data.sources: unknown key. Did you mean data.mixture?",
    "check run.yaml 'data={source: chat, path: bad.jsonl}'": "bad.jsonl:1: messages[0].role: 'bot' is not known. Known: system",
    "check run.yaml data.source=text data.path=missing.txt": "data.path: no such file or folder: missing.txt (working directory: ",
    "check run.yaml 'data={source: text, path: plain.txt}' model.vocab=50": "Set model.vocab=",
    "check run.yaml 'context={method: ring}'": "context: unknown key. Known: run, model, devices, xla, mesh, rules, pipeline, data, lora, ",
    "check run.yaml rules=fsdp": "rules: no such file: fsdp. Did you mean 'jgt:fsdp'?",
    "check run.yaml 'sync={every: 4}'": "sync: the key 'axis' is missing: an axis of the mesh that splits the batch",
    "check run.yaml 'hooks={draw: {every: 2}}'": "hooks.draw: the key 'call' is missing: MODULE:NAME of a function, which gets",
    "check run.yaml mesh.data=4": "data=4 x fsdp=2 x tensor=2 = 16 devices, but there are 8. Make the product 8, or one size -1",
    "check own.yaml": "'mine:Net' is code of your own, which a config alone does not run. Add --code PATH with the file or folder of mine",
    "check own.yaml --code mine.py hooks.draw.call=os:system": "os is the name of a module of Python's own. Give the file another name",
    "check own.yaml --code mine.py data.transform=flip": "data.transform: 'flip' is not MODULE:NAME of a function transform(sample",
    "check own.yaml --code mine.py data.transform=mine:flip": "mine.py does not define 'flip'. Known: Net, data, loss.",
    "train nothere.yaml": "nothere.yaml: cannot be read: No such file or directory. Beside it: own.yaml, run.yaml.",
    "train rum.yaml": "rum.yaml: cannot be read: No such file or directory. Did you mean 'run.yaml'?",
    "train run.yaml --train.steps 5": "An override of the run's file has no dashes: train.steps=VALUE",
    "launch --processes 2 run.yaml": "'run.yaml' cannot be given here. Write jgt launch --processes N [",
    "tune run.yaml": "there is no command 'tune'. Known: init, train, launch, doctor, top, metrics, report, ",
    "export runs/first": "the following arguments are required: OUT. `jgt export --help` lists all flags",
    "generate runs/first": "give prompts with --prompt or --prompts, or --chat to type them",
    "generate runs/first --prompt hi --temperature -1": "generate.temperature: -1.0 is too small; it must be at least 0",
    "serve runs/frist": "and no folder of Hugging Face, which has a config.json. Did you mean 'first'?",
    "schedule 1F1B --stages 4 --microbatches 8": "there is no schedule '1F1B'. Did you mean '1f1b'?",
    "plan run.yaml --target h100:8": "how many GPUs on each: h100:8x8 is 8 hosts with 8 GPUs each, and h100:1x8 one",
    "plan run.yaml --target mi300x:1x8": "such as h100:8x8, or describe another chip: --chip FILE (docs/plan.md)",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered(command, answer):
    code, text = answer(command)
    assert code == 2 and MISTAKES[command] in text
    assert len(text.splitlines()) <= 3


UNUSED = {
    "check run.yaml train.eval_every=2 data.eval_tokens=0": "train.eval_every: 2 has no effect, because no data is held out. Hold data out",
    "check run.yaml optimizer.warmup=100": "optimizer.warmup: 100 steps are not over when the run ends at step 3, so",
    "check run.yaml sample.prompt=hi": "sample.prompt: has no effect, because sample.tokens is 0. Set it, or remove the key",
    "check run.yaml": "The data was not read: jgt train FILE --dry-run reads all of it, and jgt check FILE --show-data shows some.",
}


@pytest.mark.parametrize("command", UNUSED)
def test_what_has_no_effect_is_said(command, answer):
    code, text = answer(command)
    assert code == 0 and UNUSED[command] in text
    assert [line in text for line in UNUSED.values()].count(True) == (1 if command == "check run.yaml" else 2)


# -- from Python ---------------------------------------------------------------------------------------------------


def test_swapped_arguments_of_a_signal_are_named_without_the_array():
    with pytest.raises(ValueError, match=r"^a value of type ArrayImpl is not a valid signal name\. .*: signal.tensor\(x, 'name'\)$"):
        jgt.signal.tensor("hidden", jax.numpy.ones(3))


def test_a_number_that_is_a_text_is_refused_by_a_pipeline():
    with pytest.raises(ValueError, match="microbatches is '4', which is not a whole number"):
        jgt.Pipeline(signal="layers", microbatches="4")


def test_a_step_is_no_argument_of_load():
    with pytest.raises(TypeError, match=r"jgt.load has no argument 'step'. A step is part of the path: runs/m/checkpoints/STEP"):
        jgt.load("runs/m", step=77)


def test_jaxs_own_mesh_is_taken_with_auto_axes():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharded = jgt.shard(lambda params, x: params * x, {"params": {"**": ["tensor"]}, "default": "replicate"}, mesh)
    spec = jax.P("tensor")
    assert sharded.placement(jax.numpy.ones(8), 2.0).params == jax.NamedSharding(jgt.make_mesh({"data": 2, "tensor": 4}), spec)


def test_parameters_that_do_not_fit_the_loss_are_explained():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 2, rngs=rngs)

    def loss(params, batch):
        return (batch @ params["up"]).sum()

    mesh = jgt.make_mesh({"data": 8})
    with pytest.raises(TypeError) as caught:
        jgt.init(Model, {"default": "replicate"}, mesh, nnx.Rngs(0), loss=loss, batch=jax.numpy.ones((8, 4)))
    assert "with what init_fn returns as its first argument" in "".join(caught.value.__notes__)


def test_a_region_without_a_name_is_refused():
    with pytest.raises(TypeError, match=r"^a region needs a name: with jgt.signal.context\('mlp'\):$"), jgt.signal.context:
        pass


@pytest.mark.parametrize("section", [{"hooks": {"h": {"call": print, "every": 1}}}, {"train": {"loss": print}}])
def test_a_function_is_no_value_of_a_config(section):
    with pytest.raises(jgt.document.InputError, match=r": must be text, not code, an argument of jgt.run \(such as loss=\): <built"):
        jgt.run(section)


def test_overrides_from_python_are_texts():
    with pytest.raises(TypeError, match=r"overrides are texts, such as \['train.steps=3'\], not a mapping"):
        jgt.run({}, {"train.steps": 1})


def test_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path):
    (tmp_path / "config.yaml").write_text(RUN)
    for step in (50, 100):
        (folder := Path(tmp_path / "checkpoints" / str(step))).mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(jgt.document.InputError, match=r"checkpoints/77: has no whole checkpoint. Its steps are 50, 100"):
        jgt.load(tmp_path / "checkpoints" / "77")
