"""The loggers of a run. Services are fakes of their clients, so that the tests need no network."""

import csv
import json
import sys
import threading
import types

import numpy as np
import pytest

from jgt.document import InputError
from train.config import load
from train.records import services
from train.records.media import Histogram, Image
from train.records.records import Records, open_loggers
from train.run.train import train
from train.settings.packages import is_installed

CONFIG = {"train": {"steps": 3}, "log": ["jsonl"]}


@pytest.fixture
def installed(monkeypatch):
    """Makes packages installed, or not."""
    packages = {"tensorboardX"}
    monkeypatch.setattr("train.settings.packages.is_installed", lambda package: package in packages)
    return packages


@pytest.fixture
def wandb(monkeypatch, installed):
    """A fake of wandb: all runs by id, with the calls of `log`."""
    runs = {}

    class Run:
        def __init__(self, id):
            self.id, self.rows, self.summary, self.finished = id, [], {}, False

        def log(self, values, step):
            self.rows.append((step, values))
            self.summary["_step"] = step

        def finish(self):
            self.finished = True

    def init(*, id, **options):
        run = runs.setdefault(id or f"w{len(runs)}", Run(id or f"w{len(runs)}"))
        run.options = options
        return run

    installed.add("wandb")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return runs


@pytest.fixture
def mlflow(monkeypatch, installed):
    """A fake of mlflow: all runs by id, with their parameters and the calls of `log_metrics`."""
    runs, current = {}, []

    def start_run(run_id=None, run_name=None):
        run_id = run_id or f"m{len(runs)}"
        data = types.SimpleNamespace(metrics={}, params={})
        run = runs.setdefault(run_id, types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id), data=data, rows=[], name=run_name))
        current.append(run)
        return run

    def log_metrics(values, step):
        current[-1].rows.append((step, values))
        current[-1].data.metrics.update(values)

    fake = types.SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=start_run,
        log_metrics=log_metrics,
        log_params=lambda params: current[-1].data.params.update(params),
        end_run=current.clear,
    )
    installed.add("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return runs


def start(folder, names, done, rows):
    """A start that resumes from step `done`."""
    folder.mkdir(exist_ok=True)
    records = Records(folder, loggers=open_loggers(names, folder, "tiny", lambda: CONFIG))
    records.forget_after(done)
    for step, values in rows:
        records.metrics(step, values)
    records.close()
    return records


# -- which loggers there are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "packages", "found"),
    [
        (None, set(), []),
        (None, {"tensorboardX"}, ["tensorboard"]),
        ((), {"tensorboardX"}, []),
        (("jsonl",), set(), []),
        (("csv", "jsonl", "csv"), set(), ["metrics.csv"]),
        (("wandb", "mlflow", "tensorboard"), {"tensorboardX", "wandb", "mlflow"}, ["wandb", "mlflow", "tensorboard"]),
    ],
)
def test_the_loggers_of_a_list(names, packages, found, tmp_path, installed):
    installed.clear()
    installed.update(packages)
    loggers = open_loggers(names, tmp_path, "tiny", lambda: CONFIG)
    assert [logger.sink.name for logger in loggers] == found
    for logger in loggers:
        logger.close()


def test_a_logger_that_is_not_installed_is_refused(tiny_file, installed):
    with pytest.raises(InputError) as caught:
        load(tiny_file, ["log=[jsonl, wandb, wandb, mlflow]"])
    assert list(caught.value.problems) == [
        f"command line: log=[jsonl, wandb, wandb, mlflow]: log: {name} needs the package {name}. "
        f"Install it (pip install 'jgt[{name}]'), or take {name} out of the list"
        for name in ("wandb", "mlflow")
    ]


def test_a_logger_that_does_not_exist_is_refused(tiny_file):
    with pytest.raises(InputError, match="'wandbb' is not one of jsonl, tensorboard, csv, wandb, mlflow"):
        load(tiny_file, ["log=[wandbb]"])


def test_a_folder_of_the_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "nosuchlogger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("nosuchlogger")
    assert is_installed("json")


# -- csv -----------------------------------------------------------------------------------------------------------------


def test_a_table_has_all_rows_of_metrics(tmp_path):
    run = tmp_path / "run"
    start(
        run,
        ["csv"],
        0,
        [(1, {"loss": 3.0, "mfu": None}), (2, {"loss": 2.5, "mfu": 0.5}), (2, {"eval_loss": 2.4}), (3, {"loss": 2.25, "mfu": 0.5})],
    )
    start(run, ["csv"], 2, [(3, {"loss": 2.125, "a,b": 1.0}), (4, {"loss": 2.0})])
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    plain = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [{name: float(value) for name, value in row.items() if value} for row in rows] == [
        {name: value for name, value in row.items() if value is not None} for row in plain
    ]
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4"]


# -- services ------------------------------------------------------------------------------------------------------------


def test_a_run_is_one_run_of_wandb_over_all_its_starts(tmp_path, wandb):
    start(tmp_path / "run", ["wandb"], 0, [(1, {"loss": 3.0, "mfu": None, "time": 1.0}), (2, {"loss": 2.5})])
    start(tmp_path / "run", ["wandb"], 1, [(2, {"loss": 2.5}), (2, {"eval_loss": 2.0}), (3, {"loss": 2.0})])
    (run,) = wandb.values()
    assert run.rows == [(1, {"loss": 3.0}), (2, {"loss": 2.5}), (2, {"loss": 2.5}), (2, {"eval_loss": 2.0}), (3, {"loss": 2.0})]
    assert run.finished and run.options["name"] == "tiny" and run.options["config"] == CONFIG
    assert run.options["dir"] == str(tmp_path / "run")


def test_a_run_is_one_run_of_mlflow_with_each_step_once(tmp_path, mlflow):
    start(tmp_path / "run", ["mlflow"], 0, [(1, {"loss": 3.0}), (2, {"loss": 2.5})])
    start(tmp_path / "run", ["mlflow"], 1, [(2, {"loss": 2.5}), (2, {"eval_loss": 2.0}), (3, {"loss": 2.0})])
    (run,) = mlflow.values()
    assert [(step, sorted(values)) for step, values in run.rows] == [
        (1, ["loss", "step"]),
        (2, ["loss", "step"]),
        (2, ["eval_loss", "step"]),
        (3, ["loss", "step"]),
    ]
    assert run.data.params == {"train.steps": "3", "log": "['jsonl']"} and run.name == "tiny"


def test_services_get_images_histograms_and_texts(tmp_path, wandb, mlflow, monkeypatch):
    fake, sent = sys.modules["wandb"], []
    fake.Image, fake.Html = (lambda pixels: ("image", pixels.shape)), (lambda text: ("html", text))
    fake.Histogram = lambda np_histogram: ("histogram", np_histogram[0].sum())
    sys.modules["mlflow"].log_image = lambda pixels, path: sent.append((path, pixels.shape))
    sys.modules["mlflow"].log_text = lambda text, path: sent.append((path, text))
    records = Records(tmp_path, loggers=open_loggers(["wandb", "mlflow"], tmp_path, "tiny", lambda: CONFIG))
    for value in (Image.of(np.zeros((3, 5))), Image.of(np.zeros((3, 5, 3))), Histogram.of([1.0, 2.0]), "a < b"):
        records.medium(7, "x", value)
    records.close()
    shown = [("image", (3, 5)), ("image", (3, 5, 3)), ("histogram", 2), ("html", "<pre>a &lt; b</pre>")]
    assert wandb["w0"].rows == [(7, {"x": value}) for value in shown]
    assert sent == [("x/7.png", (3, 5, 1)), ("x/7.png", (3, 5, 3)), ("x/7.txt", "a < b")]
    assert records.lost == {}


def test_a_service_that_fails_costs_rows_and_comes_back(tmp_path, wandb, monkeypatch, capsys):
    class CommError(Exception):
        pass

    connect, attempts = sys.modules["wandb"].init, []

    def init(**options):
        attempts.append(options)
        if len(attempts) < 3:
            raise CommError("no network\nand more")
        return connect(**options)

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    records = start(tmp_path / "run", ["wandb"], 0, [(step, {"loss": 1.0}) for step in range(1, 6)])
    assert records.lost == {"wandb": 2}
    assert [step for step, _ in next(iter(wandb.values())).rows] == [3, 4, 5]
    err = capsys.readouterr().err
    assert err.count("jgt: wandb cannot be written: CommError: no network. Training continues") == 1


def test_a_service_that_hangs_does_not_keep_the_run(tmp_path, monkeypatch, capsys):
    hanging = threading.Event()

    class Client:
        def log(self, step, values):
            hanging.wait(20)

    monkeypatch.setattr(services, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(services, "_WAITING_ROWS", 3)
    service = services.Service("mlflow", Client)
    for step in range(10):
        service.add(step, {"loss": 1.0})
    service.close()
    hanging.set()
    assert service.sink.lost >= 6
    assert "jgt: mlflow cannot be written: it has not taken the last 3 rows" in (err := capsys.readouterr().err)
    assert "mlflow does not answer; the run ends without it" in err


def test_a_damaged_file_of_ids_begins_new_runs(tmp_path, wandb):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "loggers.json").write_text("[1, 2")
    start(tmp_path / "run", ["wandb"], 0, [(1, {"loss": 3.0})])
    assert json.loads((tmp_path / "run" / "loggers.json").read_text()) == {"wandb": "w0"}


def test_a_run_logs_to_all_of_them(tiny, tmp_path, wandb, mlflow):
    train(tiny("train.steps=2", "data.eval_tokens=1000", "log=[csv, wandb, mlflow, tensorboard]"))
    assert len(next(iter(wandb.values())).rows) == len(next(iter(mlflow.values())).rows) == 3
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 4
    assert list((tmp_path / "run" / "tensorboard").iterdir())
