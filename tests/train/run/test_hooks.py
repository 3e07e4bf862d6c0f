"""Hooks: when they are called, what they see and log, and that nothing they do changes training."""

import io
import struct
import sys

import jax
import matplotlib as mpl
import matplotlib.image as mpl_image
import numpy as np
import pytest
from runs import Processes, flags, free_port, rows

from jgt.document import InputError
from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import Steps
from train.config import load
from train.files.ends import Exit
from train.processes.watch import Watch
from train.records.media import Histogram, Image
from train.run.api import run_here
from train.run.hooks import HookError
from train.run.hooks.moment import fetched
from train.run.train import train
from train.settings.code.files import read_code
from train.setup import prepare

mpl.use("Agg")

CODE = """
import time
import jax, jax.numpy as jnp, numpy as np

seen = []


class Watch:
    def __init__(self, width=3):
        self.width = width

    def __call__(self, now):
        seen.append((now.event, now.step))
        assert now.last_step == 8 and self.width == 5
        assert now.step == 0 or {"loss", "grad_norm", "lr", "tokens_per_s", "step_time_s"} <= set(now.metrics)
        assert ("eval_loss" in now.metrics) == (now.event == "eval")


def draw(now, title="table"):
    table = now.params["embed"]["embedding"]
    now.image(title, jax.nn.sigmoid(table))
    now.histogram(f"{title}/values", table)
    now.text("note", f"<step {now.step}>")
    now.scalar("spread", jnp.std(table))


def judge(now):
    tokens = jnp.zeros((2, 8), jnp.int32)
    assert now.model(tokens).shape == (2, 8, 256)
    np.testing.assert_allclose(now.loaded.logits(tokens), now.model(tokens), atol=1e-5)
    return {"eval_even": -now.step if now.step <= 4 else 10.0 + now.step}


def write(now):
    seen.append(now.loaded.generator._programs)
    now.text("sample", now.loaded.generate(["12"], tokens=2, seed=now.step)[0].text)


def fail(now):
    if now.step >= 4:
        raise ValueError("no such colour")


class Keeper:
    def __init__(self):
        self.kept = None

    def __call__(self, now):
        if self.kept is not None:
            print(self.kept + 1)
        self.kept = now.state.params["embed"]["embedding"]


def mutate(now):
    table = np.asarray(now.state.params["embed"]["embedding"])
    try:
        table[:] = 0
    except ValueError as error:
        seen.append(str(error))
    # Views of the devices' memory outlive the step.
    seen.append((table, table.copy()))
    now.state.params["embed"]["embedding"] = jnp.zeros_like(table)
    now.state.params.clear()
    now.metrics.clear()
    now.model.embed = None


def donate(now):
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(now.state.params)


def returns_a_list(now):
    return [1]


def takes_a_name(now):
    return {"eval_loss": 1.0, "loss": 2.0}


def returns_an_array(now):
    return {"x": np.zeros(3)}


def hang(now):
    time.sleep(1000)


def fails_in_one(now):
    if now.step == 4 and jax.process_index() == 1:
        raise ValueError("only here")


def total(now):
    return {"total": now.state.params["embed"]["embedding"].sum()}


class NotCallable:
    pass


class Breaks:
    def __init__(self):
        raise RuntimeError("broken")


def no_argument():
    pass


value = 3
"""
COMMON = ("data.eval_tokens=2000", "train.steps=8", "checkpoint.minutes=null", "log=[]")


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "my_hooks.py"
    path.write_text(CODE)
    yield path
    sys.modules.pop("my_hooks", None)


@pytest.fixture
def hooked(tiny_file, mine, tmp_path):
    """The tiny run with an entry of `hooks:` and further overrides."""
    return lambda entry, *overrides, name="run": load(
        tiny_file,
        [f"run.dir={tmp_path / name}", *COMMON, *([f"hooks={{it: {entry}}}"] if entry else []), *overrides],
        code=read_code([mine]),
    )


def seen():
    return sys.modules["my_hooks"].seen


def losses(folder):
    return [row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row]


def last_state(run):
    setup, (saved, _) = prepare(run), find_checkpoint(run.config.run.path)
    return jax.device_get(restore(saved, setup.saved_shapes, setup.saved_shardings))


def events_of(folder):
    """The values of TensorBoard's files, by step and tag."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found.update({(event.step, value.tag): value for value in event.summary.value})
    return found


# -- when, and with what --------------------------------------------------------------------------------------------


def test_a_hook_is_called_at_its_steps_and_events(hooked, tmp_path, read_rows):
    entry = "{call: 'my_hooks:Watch', every: 3, at: [start, eval, save, end], width: 5}"
    assert train(hooked(entry, "train.eval_every=4", "checkpoint.every=5")) == 0
    expected = [("start", 0), ("step", 3), ("eval", 4), ("save", 5), ("step", 6), ("save", 8), ("eval", 8), ("end", 8)]
    assert seen() == expected
    found = [(row["event"], row["step"], row["hook"]) for row in read_rows(tmp_path / "run" / "events.jsonl") if row["phase"] == "hook"]
    assert found == [(*call, "it") for call in expected]


def test_images_histograms_texts_and_numbers_are_logged(hooked, tmp_path):
    run = hooked("{call: 'my_hooks:draw', every: 3, title: rows}", "log=[tensorboard, csv]")
    assert train(run) == 0
    found = events_of(tmp_path / "run")
    assert sorted(step for step, tag in found if tag == "rows") == [3, 6]
    image, histogram, text = (found[6, tag] for tag in ("rows", "rows/values", "note"))
    shape = (image.image.height, image.image.width, image.image.colorspace)
    assert shape == (256, 32, 1)
    pixels = mpl_image.imread(io.BytesIO(image.image.encoded_image_string))
    assert pixels.shape == (256, 32) and 0.3 < pixels.mean() < 0.7
    assert histogram.histo.num == 256 * 32 and sum(histogram.histo.bucket) == 256 * 32
    assert text.tensor.string_val == [b"    <step 6>"] and text.metadata.plugin_data.plugin_name == "text"
    spread = {row["step"]: row["spread"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "spread" in row}
    assert spread.keys() == {3, 6} and found[6, "spread"].simple_value == pytest.approx(spread[6])
    assert "spread" in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]


def test_what_no_logger_shows_is_said_once(hooked, capsys):
    assert train(hooked("{call: 'my_hooks:draw', every: 3}")) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "no logger of this run shows" in line]
    media = ("an image such as table", "a histogram such as table/values", "a text such as note")
    assert said == [f"jgt: no logger of this run shows {medium}. Add tensorboard or wandb to log:" for medium in media]


def test_what_a_hook_returns_at_an_evaluation_joins_it_and_decides(hooked, tmp_path, capsys):
    more = ("train.eval_every=2", "checkpoint={keep: 1, best: eval_even}", "train.stop_early={by: eval_even, patience: 1}")
    assert train(hooked("{call: 'my_hooks:judge', at: [eval]}", *more)) == 0
    found = [(row["step"], row["eval_even"]) for row in rows(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in row]
    assert found == [(2, -2), (4, -4), (6, 16)]
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [4, 6]
    assert "eval_even 16.00" in capsys.readouterr().out


def test_a_metric_that_the_hooks_do_not_return_is_refused_at_the_first_evaluation(hooked, tmp_path):
    run = hooked("{call: 'my_hooks:judge', at: [eval]}", "train.eval_every=2", "checkpoint.best=eval_odd")
    with pytest.raises(
        InputError, match=r"checkpoint\.best: no evaluation has the metric 'eval_odd'.* Evaluations have eval_loss, eval_even"
    ):
        train(run)
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [2]


def test_a_hook_writes_with_the_model(hooked, tmp_path):
    pytest.importorskip("tensorboardX")
    assert train(hooked("{call: 'my_hooks:write', every: 3}", "log=[tensorboard]")) == 0
    found = events_of(tmp_path / "run")
    assert {step for step, tag in found if tag == "sample"} == {3, 6}
    # They are compiled once.
    assert seen()[0] is seen()[1]


def test_hooks_from_python(tiny_file, tmp_path):
    calls = []

    def note(now, width):
        calls.append((now.step, width))

    overrides = [f"run.dir={tmp_path / 'run'}", *COMMON, "hooks={note: {every: 4, width: 3}}"]
    assert run_here(tiny_file, overrides, hooks={"note": note}).is_done
    assert calls == [(4, 3), (8, 3)]


# -- nothing that a hook does changes training ----------------------------------------------------------------------


@pytest.fixture
def plain(hooked, tmp_path):
    """The run without hooks."""
    run = hooked("", name="plain")
    assert train(run) == 0
    return run


def test_a_run_with_hooks_has_the_same_program_losses_and_state(hooked, plain, tmp_path):
    run = hooked("{call: 'my_hooks:mutate', every: 1}")
    assert prepare(run).lower_train_step().as_text() == prepare(plain).lower_train_step().as_text()
    assert train(run) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    jax.tree.map(np.testing.assert_array_equal, last_state(run), last_state(plain))
    # The views that a hook keeps do not change under it either.
    assert seen()[0] == "assignment destination is read-only"
    for entry in seen()[1::2]:
        np.testing.assert_array_equal(*entry)


def test_a_restart_in_the_middle_is_the_unbroken_run(hooked, stopped_at, tmp_path):
    def start(name):
        more = ("train.eval_every=2", "checkpoint={every: 4, keep: 1, best: eval_even}", "log=[tensorboard]")
        return hooked("{call: 'my_hooks:judge', at: [eval]}", "hooks.draw={call: 'my_hooks:draw', every: 2}", *more, name=name)

    assert train(start("straight")) == 0
    with stopped_at(7):
        train(start("broken"))
    assert train(start("broken")) == 0
    found = [
        [
            {k: v for k, v in row.items() if k in ("step", "loss", "eval_loss", "eval_even", "spread")}
            for row in rows(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("straight", "broken")
    ]
    assert found[0] == found[1]
    images = [
        {key: value.image.encoded_image_string for key, value in events_of(tmp_path / name).items() if key[1] == "table"}
        for name in ("straight", "broken")
    ]
    assert images[0] == images[1] and len(images[0]) == 4
    assert Steps(tmp_path / "broken" / "checkpoints").listed() == Steps(tmp_path / "straight" / "checkpoints").listed() == [4, 8]
    jax.tree.map(np.testing.assert_array_equal, last_state(start("straight")), last_state(start("broken")))


# -- hooks that fail ------------------------------------------------------------------------------------------------


def test_an_error_ends_the_run_with_the_state_saved(hooked, plain, tmp_path, mine, capsys):
    with pytest.raises(HookError) as caught:
        train(hooked("{call: 'my_hooks:fail', every: 2}"))
    line = CODE.splitlines().index('        raise ValueError("no such colour")') + 1
    expected = f"hooks.it: the call at step 4 (step) failed: {mine}:{line}: ValueError: no such colour"
    assert str(caught.value).endswith(expected) and str(caught.value).startswith("command line: ")
    assert "the newest checkpoint is from step 4" in capsys.readouterr().err
    # Without the hook the run continues as one that never had it.
    assert train(hooked("")) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_a_warning_is_a_line_and_training_continues(hooked, plain, tmp_path, capsys):
    assert train(hooked("{call: 'my_hooks:fail', every: 2, on_error: warn}")) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "no such colour" in line]
    assert len(said) == 3 and all(line.endswith("ValueError: no such colour. Training continues") for line in said)
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "Keeper",
            r"step 4 \(step\) failed: .*my_hooks\.py:\d+: RuntimeError: .*deleted.* The arrays of a moment live until the next step",
        ),
        (
            "donate",
            r"has deleted arrays of the state, for example by giving them to a function that donates its arguments\. Give it copies",
        ),
        ("returns_a_list", r"TypeError: it returned a value of type list\. Return nothing, or a mapping of names to numbers"),
        ("takes_a_name", r"ValueError: the step has a metric 'loss' already\. Take another name"),
        ("returns_an_array", r"ValueError: the metric x is float64\[3\], not a number"),
    ],
)
def test_what_a_hook_may_not_do_has_a_message(hooked, call, message):
    with pytest.raises(HookError, match=message):
        train(hooked(f"{{call: 'my_hooks:{call}', every: 2}}"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{call: 'my_hooks:drew', every: 2}", "hooks.it.call: {mine} does not define 'drew'. Did you mean 'draw'?"),
        ("{call: draw, every: 2}", "hooks.it.call: 'draw' is not MODULE:NAME, such as"),
        ("{call: 'my_hooks:value', every: 2}", "hooks.it.call: my_hooks:value is 3. Name a class or a function"),
        ("{call: 'my_hooks:NotCallable', every: 2}", "cannot be called. Give the class a method __call__(self, now)"),
        ("{call: 'my_hooks:Breaks', every: 2}", "hooks.it.call: Breaks failed: {mine}:"),
        ("{call: 'my_hooks:no_argument', every: 2}", "no_argument() cannot be called as no_argument(now): too many positional arguments"),
        ("{call: 'my_hooks:draw', every: 2, titel: x}", "hooks.it.titel: draw has no argument 'titel'. Did you mean 'title'?"),
        ("{call: 'my_hooks:Watch', every: 2, widht: 1}", "hooks.it.widht: Watch has no argument 'widht'. Did you mean 'width'?"),
        ("{call: 'my_hooks:draw', every: 0}", "hooks.it.every: 0 is too small; it must be at least 1"),
        ("{call: 'my_hooks:draw'}", "hooks.it.call: is never called. Add every: N"),
        ("{call: 'my_hooks:draw', at: [evals]}", "'evals' is not one of start, eval, save, end. Did you mean 'eval'?"),
        ("{call: 'my_hooks:draw', every: 2, on_error: ignore}", "hooks.it.on_error: 'ignore' is not one of stop, warn"),
        ("{every: 2}", "hooks.it: the key 'call' is missing"),
    ],
)
def test_wrong_entries_are_refused(hooked, mine, entry, message):
    with pytest.raises(InputError) as caught:
        train(hooked(entry))
    (line,) = caught.value.problems
    assert line.startswith("command line: ") and message.format(mine=mine) in line


def test_a_config_alone_calls_nothing(tiny):
    with pytest.raises(InputError, match=r"a config alone does not run\. Add --code PATH"):
        tiny("hooks={it: {call: 'mine:system', every: 1}}")


def run_processes(count, tiny_file, mine, tmp_path, nursery, root, *overrides):
    """The exit codes and the outputs of a run with two devices in each process."""
    common = [f"run.dir={tmp_path / 'run'}", *COMMON, "mesh={data: -1}", "rules={axes: {batch: [data]}, default: replicate}"]
    command = ["--config", str(tiny_file), "--code", str(mine), *common, "devices.virtual_cpu=2", *overrides]
    port = free_port()
    commands = [[*command, *(flags(port, count, number) if count > 1 else [])] for number in range(count)]
    with Processes(tmp_path, commands, root, nursery=nursery) as processes:
        return processes.wait_all(250), [processes.output(number) for number in range(count)]


def test_the_watch_knows_which_hook_runs(hooked, monkeypatch):
    found, phase = [], Watch.phase
    monkeypatch.setattr(Watch, "phase", lambda self, what: found.append(what) or phase(self, what))
    assert train(hooked("{call: 'my_hooks:write', every: 8}")) == 0
    assert "the hook it" in found


@pytest.mark.slow
def test_a_hook_that_hangs_is_ended_by_the_watchdog(tiny_file, mine, tmp_path, nursery, pytestconfig):
    more = ("watchdog.start_seconds=50", "hooks={slow: {call: 'my_hooks:hang', every: 4}}")
    codes, (output,) = run_processes(1, tiny_file, mine, tmp_path, nursery, pytestconfig.rootpath, *more)
    assert codes == [Exit.HUNG], output
    assert "hangs: the hook slow has taken more than 50 s" in output


@pytest.mark.slow
def test_an_error_in_one_of_two_processes_ends_both_with_the_state_saved(tiny_file, mine, tmp_path, nursery, pytestconfig):
    more = ("hooks={one: {call: 'my_hooks:fails_in_one', every: 2}, all: {call: 'my_hooks:total', every: 1}}",)
    codes, outputs = run_processes(2, tiny_file, mine, tmp_path, nursery, pytestconfig.rootpath, *more)
    assert set(codes) <= {1, Exit.PEER} and 1 in codes, outputs
    assert "only here" in outputs[1] and "in another process" in outputs[0]
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [4]
    assert len([row for row in rows(tmp_path / "run" / "metrics.jsonl") if "total" in row]) == 3


# -- media ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3), (3, 5, 4)])
@pytest.mark.parametrize("kind", ["float32", "uint8", "bool"])
def test_an_image_is_a_png_of_its_values(shape, kind):
    values = np.random.default_rng(0).random(shape)
    values = (values * 255).astype(np.uint8) if kind == "uint8" else (values > 0.5 if kind == "bool" else values.astype(kind))
    found = mpl_image.imread(io.BytesIO(Image.of(values).png()))
    expected = values / 255 if kind == "uint8" else values.astype(float)
    np.testing.assert_allclose(found, expected.reshape(found.shape), atol=0.5 / 255 + 1e-6)


def test_a_figure_is_an_image():
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(2, 1), dpi=50)
    axes.plot([1, 2])
    assert Image.of(figure).pixels.shape == (50, 100, 4)
    plt.close(figure)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((2, 2, 2)), np.zeros((0, 2)), np.array([["a"]])])
def test_what_is_no_image_is_refused(values):
    with pytest.raises(ValueError, match=r"An image is \[height, width\]"):
        Image.of(values)


def test_a_histogram_counts_finite_values():
    found = Histogram.of([1.0, 2.0, np.nan, np.inf, 2.0])
    assert (found.counts.sum(), found.total, found.squares) == (3, 5.0, 9.0) and len(found.edges) == len(found.counts) + 1
    with pytest.raises(ValueError, match="no finite values"):
        Histogram.of([np.nan])


def test_small_floats_are_fetched_as_those_that_numpy_knows():
    assert fetched(jax.numpy.ones(2, jax.numpy.bfloat16)).dtype == np.float32
    assert fetched(jax.numpy.arange(2)).dtype == np.int32
