"""Code of the user's own: which names a config may use, how objects are called, and what is reported."""

import os
import sys

import jax
import pytest

import jgt
from jgt.document import InputError
from train.config import load
from train.files.ends import EndError
from train.run.api import run_here
from train.settings.code.files import read_code
from train.settings.code.names import call_with, load_object, name_problem
from train.setup import prepare

MODELS = """
import dangerous
from os import system

class Mamba:
    def __init__(self, width, depth=2, *, vocab):
        self.made = width, depth, vocab

def broken():
    raise ValueError("no")
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "dangerous.py").write_text("import pathlib, sys\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "deep" / "more.py").write_text("def make(): return 1\n")
    (tmp_path / "json.py").write_text("raise RuntimeError\n")
    yield read_code([tmp_path])
    for name in ("my_models", "dangerous", "parts.deep.more", "parts.deep", "parts"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_models:Mamba", None),
        ("parts.deep.more:make", None),
        ("my_models:Manba", "Did you mean 'Mamba'?"),
        ("my_model:Mamba", "Did you mean 'my_models'?"),
        # Imported there, and defined elsewhere.
        ("my_models:system", "does not define 'system'"),
        ("my_models:dangerous", "does not define 'dangerous'"),
        ("os:system", "--code has no module 'os'"),
        ("json:loads", "--code has no module 'json'"),
        ("../my_models:Mamba", "is not MODULE:NAME"),
        ("my_models:Mamba.__init__", "is not MODULE:NAME"),
        ("my_models:", "is not MODULE:NAME"),
        ("python:Mamba", "--code has no module 'python'"),
    ],
)
def test_only_names_that_the_code_defines_are_taken_and_nothing_runs(code, tmp_path, name, expected):
    problem = name_problem(name, "model.kind", code)
    assert problem is None if expected is None else expected in problem
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: {tmp_path / 'run'}}}\nmodel:\n  kind: '{name}'\n")
    if expected is not None:
        with pytest.raises(InputError) as caught:
            load(file, code=code)
        (line,) = caught.value.problems
        assert line.startswith(f"{file}:3: model.kind: ") and expected in line
    assert not (tmp_path / "dangerous.ran").exists()


def test_a_config_alone_runs_nothing(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {kind: 'mine:system'}\n")
    with pytest.raises(InputError, match=r"a config alone does not run\. Add --code PATH"):
        load(file)


def test_modules_of_the_code_import_each_other(code, tmp_path):
    made = call_with(load_object("my_models:Mamba", "model.kind", code, "x"), {"width": 3}, {"vocab": 7, "seq": 9}, str)
    assert made.made == (3, 2, 7)
    assert (tmp_path / "dangerous.ran").exists()
    # Python's own module is not hidden.
    import json

    assert json.loads("1") == 1


def test_what_a_signature_does_not_take_and_lacks_is_reported(code):
    target = load_object("my_models:Mamba", "model.kind", code, "x")
    with pytest.raises(InputError) as caught:
        call_with(target, {"widht": 3}, {"seq": 9}, lambda key: f"run.yaml:3: model.{key or 'kind'}")
    remedy = "Call it as a value that the run passes (seq), or add a key of its name here"
    assert set(caught.value.problems) == {
        f"run.yaml:3: model.kind: Mamba needs the argument 'vocab'. {remedy}",
        f"run.yaml:3: model.kind: Mamba needs the argument 'width'. {remedy}",
        "run.yaml:3: model.widht: Mamba has no argument 'widht'. Did you mean 'width'? It takes: width, depth, vocab",
    }


def test_an_error_in_the_code_is_one_line_with_its_place(code, tmp_path):
    with pytest.raises(InputError) as caught:
        call_with(load_object("my_models:broken", "model.kind", code, "x"), {}, {}, lambda key: "run.yaml:3: model.kind")
    line = MODELS.splitlines().index('    raise ValueError("no")') + 1
    assert caught.value.problems == (f"run.yaml:3: model.kind: broken failed: {tmp_path / 'my_models.py'}:{line}: ValueError: no",)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["nothing"], "no such file or folder"),
        (["text.txt"], "is not a Python file or a folder"),
        (["empty"], "has no Python files"),
        (["a/same.py", "b/same.py"], "are both the module same. Rename one of them"),
        (["random.py"], "random is the name of a module of Python's own. Give the file another name"),
    ],
)
def test_paths_that_are_no_code(tmp_path, paths, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    (tmp_path / "random.py").touch()
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"NAME = '{folder}'\n")
    with pytest.raises(InputError, match=expected):
        read_code([tmp_path / path for path in paths])


def test_a_file_that_is_not_python_is_reported_once(code, tmp_path):
    (tmp_path / "my_models.py").write_text("def f(:\n")
    config = {"model": {"kind": "my_models:Mamba"}, "train": {"loss": "my_models:loss"}, "optimizer": {"name": "my_models:sgd"}}
    with pytest.raises(InputError) as caught:
        load(config, code=code)
    assert caught.value.problems == (f"{tmp_path / 'my_models.py'}:1: is not Python: invalid syntax",)


def test_a_value_is_no_function(code, tmp_path):
    (tmp_path / "my_models.py").write_text("RATE = 3\n")
    with pytest.raises(InputError, match=r"x: train\.loss: my_models:RATE is 3\. Name a class or a function"):
        load_object("my_models:RATE", "train.loss", read_code([tmp_path]), "x")


LINEN = """
import jax.numpy as jnp
from flax import linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))

def data():
    return [{"x": jnp.full(8, n / 8), "y": jnp.float32(n)} for n in range(8)]

def loss(model, batch, train):
    return jnp.mean((model(batch["x"], train)[:, 0] - batch["y"]) ** 2)

def loss_with_default(model, batch, train=False):
    return loss(model, batch, train)
"""


@pytest.mark.parametrize("loss", ["loss", "loss_with_default"])
def test_a_loss_of_a_linen_model_learns_whether_it_is_trained(tmp_path, loss):
    (tmp_path / "linen_model.py").write_text(LINEN)
    names = {"model": {"kind": "linen_model:Net"}, "data": {"source": "linen_model:data"}}
    setup = prepare(load({**names, "train": {"loss": f"linen_model:{loss}", "batch": 8}}, code=read_code([tmp_path])), num_devices=1)
    assert setup.shapes.variables.keys() == {"rngs"}
    program = setup.program
    draws = ["random_bits" in str(jax.make_jaxpr(one)(*program.shapes)) for one in (program.loss, program.evaluated)]
    assert draws == [True, False]


LEAKY = """
import jax.numpy as jnp
from flax import nnx

SEEN = []

def data():
    return [{"x": jnp.ones(8)}] * 8

def loss(model, batch):
    SEEN.append(model(batch["x"]).mean())
    return SEEN[0]

def linear(rngs):
    return nnx.Linear(8, 1, rngs=rngs)
"""


def test_arrays_of_an_earlier_call_are_refused(tmp_path):
    (tmp_path / "leaky_model.py").write_text(LEAKY)
    names = {"model": {"kind": "leaky_model:linear"}, "data": {"source": "leaky_model:data"}}
    run = load({**names, "train": {"loss": "leaky_model:loss", "batch": 8}}, code=read_code([tmp_path]))
    with pytest.raises(InputError, match=r"^config: the model or its loss: a call uses an array of an earlier one"):
        prepare(run, num_devices=1)


def test_from_python_a_text_is_an_override_and_a_key_is_none():
    with pytest.raises(InputError, match=r"^Python: data\.source: python:object: returned a value of type int\. Return samples"):
        jgt.run({"train": {"loss": "a:b"}}, "train.steps=3", data=lambda: 3, loss=lambda model, batch: 0.0)
    with pytest.raises(InputError, match=r"^command line: stpes=3: "):
        jgt.run({}, "stpes=3")
    with pytest.raises(TypeError, match=r"jgt\.run has no argument 'steps'\. Values of the config are overrides"):
        jgt.run({}, steps=3)


def test_a_copy_has_the_checksum_of_the_code_and_a_change_another(code, tmp_path):
    target = tmp_path / "other" / "code"
    code.copy(target)
    assert read_code([target]).checksum == code.checksum
    (target / "my_models.py").write_text(MODELS + "\n")
    assert read_code([target]).checksum != code.checksum


def test_a_changed_file_is_imported_anew_in_the_same_process(tmp_path):
    for answer in (1, 2):
        (tmp_path / "notebook_part.py").write_text(f"def answer(): return {answer}{' ' * answer}\n")
        assert load_object("notebook_part:answer", "train.loss", read_code([tmp_path]), "x")() == answer


def test_a_pipe_among_the_files_blocks_nobody(code, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert read_code([tmp_path]).checksum == code.checksum


def test_an_error_in_a_model_of_ones_own_has_its_line(tmp_path):
    (tmp_path / "bad_model.py").write_text(
        "from flax import nnx\n\n\nclass Bad(nnx.Module):\n    def __init__(self, rngs):\n        self.a = nnx.Linear(2, 2, rngs=rngs)\n\n"
        "    def __call__(self, tokens):\n        return self.a(tokens.missing)\n"
    )
    (tmp_path / "run.yaml").write_text("model: {kind: 'bad_model:Bad'}\n")
    run = load(tmp_path / "run.yaml", ["mesh=null"], code=read_code([tmp_path / "bad_model.py"]))
    with pytest.raises(InputError) as caught:
        prepare(run, num_devices=1)
    (line,) = caught.value.problems
    assert line.startswith(
        f"{tmp_path / 'run.yaml'}:1: model.kind: a call with tokens [b, s] failed: {tmp_path / 'bad_model.py'}:9: AttributeError: "
    )


DECODERS = """
import jax
import jax.numpy as jnp
from flax import nnx
from jgt.signal import context

class Stacked(nnx.Module):
    def __init__(self, *, vocab, dtype, rngs):
        self.embed = nnx.Embed(vocab, 8, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(8, 8, dtype=dtype, rngs=rngs))(rngs.split(3))
        self.head = nnx.Linear(8, vocab, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        with context("layers"):
            x = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                self.embed(tokens).astype(self.head.dtype), self.layers)
        return self.head(x)

class Flat(nnx.Module):
    def __init__(self, *, vocab, rngs):
        self.embed, self.head = nnx.Embed(vocab, 8, rngs=rngs), nnx.Linear(8, vocab, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))
"""


def test_recompute_and_wide_gradients_are_for_models_of_ones_own_too(tmp_path):
    (tmp_path / "my_decoders.py").write_text(DECODERS)

    def program(kind, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(f"model: {{kind: 'my_decoders:{kind}', dtype: bf16, seq: 4, vocab: 16}}\ntrain: {{batch: 8}}\n")
        setup = prepare(load(file, overrides, code=read_code([tmp_path])))
        return str(setup.train_step().trace(*setup.step_shapes).jaxpr)

    plain = program("Stacked")
    assert "prevent_cse" not in plain
    assert "prevent_cse" in program("Stacked", "train.remat=block")
    # Each layer's kernel, the table and the head.
    wide = program("Stacked", "optimizer.gradients=f32")
    assert wide.count("preferred_element_type=float32") >= plain.count("preferred_element_type=float32") + 2
    with pytest.raises(InputError, match=r"train\.remat: the model's layers are not a scan over stacked parameters"):
        program("Flat", "train.remat=block", "model.dtype=f32")


OWN_SIZES = """
import jax.numpy as jnp
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, width=4, rngs):
        self.layer = nnx.Linear(3, width, rngs=rngs)

def typed(*, dtype, rngs):
    return nnx.Linear(3, 4, dtype=dtype, rngs=rngs)

def loss(model, batch):
    return jnp.mean(model.layer(batch["x"]) ** 2) if isinstance(model, Net) else jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2)

def data():
    return [{"x": [1.0, 2.0, 3.0]}] * 40

def sized(seq):
    return data()
"""


@pytest.mark.parametrize(
    ("model", "source", "expected"),
    [
        ("kind: 'sizes:Net', dtype: bf16, vocab: 300, seq: 77", "data", ["dtype", "vocab", "seq"]),
        ("kind: 'sizes:Net', dtype: bf16, seq: 77", "sized", ["dtype"]),
        ("kind: 'sizes:typed', dtype: bf16", "data", []),
        # As the config of a run directory has them.
        ("kind: 'sizes:Net', dtype: f32, vocab: 256, seq: 128", "data", []),
    ],
)
def test_a_key_of_the_model_that_nothing_takes_is_an_error(tmp_path, model, source, expected):
    (tmp_path / "sizes.py").write_text(OWN_SIZES)
    file = tmp_path / "run.yaml"
    file.write_text(f"train: {{batch: 8, loss: 'sizes:loss'}}\nmodel: {{{model}}}\ndata: {{source: 'sizes:{source}'}}\n")
    problems = ()
    try:
        prepare(load(file, code=read_code([tmp_path])))
    except InputError as error:
        problems = error.problems
    assert sorted(problems) == sorted(f"{file}:2: model.{key}: Net has no argument {key!r}. It takes: width" for key in expected)


EXITS = """
import sys
import numpy as np
import optax
from flax import nnx

def leave(here):
    if here == "{place}":
        sys.exit(0)

leave("import")

class Net(nnx.Module):
    def __init__(self, *, rngs):
        leave("model")
        self.layer = nnx.Linear(3, 4, rngs=rngs)

def loss(model, batch):
    leave("loss")
    return (model.layer(batch["x"]) ** 2).mean()

class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 37:
            leave("sample")
        return {{"x": np.ones(3, np.float32)}}

def data():
    leave("data")
    return Samples()

def optimizer():
    def update(*arguments):
        leave("update")
        return plain.update(*arguments)

    plain = optax.sgd(0.1)
    return optax.GradientTransformation(plain.init, update)
"""


@pytest.mark.parametrize("place", ["import", "model", "loss", "data", "sample", "update"])
def test_an_exit_of_ones_own_code_is_never_a_success(tmp_path, place):
    (tmp_path / "exits.py").write_text(EXITS.format(place=place))
    names = {"model": {"kind": "exits:Net"}, "data": {"source": "exits:data"}, "optimizer": {"name": "exits:optimizer"}}
    steps = {"train": {"loss": "exits:loss", "steps": 8, "batch": 8}, "checkpoint": {"every": 2}, "mesh": {"data": 1}}
    with pytest.raises((InputError, EndError), match=r"exits\.py:9: SystemExit: 0"):
        run_here({"run": {"dir": str(tmp_path / "run")}, **names, **steps}, code=tmp_path / "exits.py")
