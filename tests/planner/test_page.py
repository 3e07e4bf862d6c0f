"""The page of a plan loads nothing, contains everything, and escapes what it shows."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import jgt
from jgt.planner.findings import Finding
from jgt.planner.panels import Panel, Span
from jgt.planner.plan import plan
from jgt.planner.view.page import page
from jgt.planner.view.report import Report
from jgt.signal import context

HOSTILE = "</script><img src=x onerror=alert(1)>/a&b'\".py:3"


@pytest.fixture(scope="module")
def small():
    """A plan with two signals, each with a matmul whose partial sums are added, on two axes."""
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})

    def loss(params, x):
        with context("attn"):
            x = jnp.tanh(x @ params["in"]) @ params["out"]
        with context("mlp"):
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    shapes = {"in": (32, 64), "out": (64, 32), "up": (32, 96), "down": (96, 32)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    columns, rows = [None, "tensor"], ["tensor", None]
    signals = {"attn": {"params": {"in": columns, "out": rows}}, "mlp": {"params": {"up": columns, "down": rows}}}
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "signals": signals, "default": "replicate"})
    where = jgt.place(loss, rules, mesh, params, x)
    return plan(jax.jit(jax.value_and_grad(jgt.shard(loss, rules, mesh)), in_shardings=(where.params, where.inputs(x))), params, x)


@pytest.fixture(scope="module")
def hostile(small):
    """The same with HTML in its texts, because paths may contain anything."""
    first, *others = small.collectives
    finding = Finding(kind="unexplained", signal="attn", source=HOSTILE, rule="", bytes=1, text=f"{HOSTILE}: attn: too much")
    return dataclasses.replace(small, collectives=(dataclasses.replace(first, source=HOSTILE), *others), findings=(finding,))


class Reader(HTMLParser):
    """The tags of a page with their attributes, and the texts between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.scripts, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)


def data_of(text):
    """The JSON inside a page."""
    return json.loads(Reader(text).scripts[0])


def test_the_page_loads_nothing(small):
    text = page(small)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text)
    tags = Reader(text).tags
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [
        attrs for _, attrs in tags if attrs.keys() & {"src", "href", "srcset", "action"} or any(name.startswith("on") for name in attrs)
    ]


def test_the_page_shows_every_signal_and_collective(small):
    texts = Reader(page(small)).texts
    assert {row.signal for row in small.signals} >= {"attn", "mlp"}
    for row in small.signals:
        assert texts.count(row.signal) >= 1
    assert {c.source for c in small.collectives} <= set(texts)
    assert any("data 2 x tensor 4 = 8 devices" in text and "Sent over each axis" in text for text in texts)


def test_the_json_inside_is_the_plan(small, tmp_path):
    Report(small).write_page(tmp_path / "plan.html")
    assert data_of((tmp_path / "plan.html").read_text(encoding="utf-8")) == json.loads(json.dumps(small.to_json()))


def test_hostile_names_are_escaped(hostile):
    text = page(hostile)
    reader = Reader(text)
    assert "<img" not in text and text.count("</script>") == 1
    assert not {tag for tag, _ in reader.tags} & {"img", "a"}
    assert HOSTILE in reader.texts
    assert any(f"! {HOSTILE}: attn: too much" in shown for shown in reader.texts)
    assert data_of(text)["collectives"][0]["source"] == HOSTILE


def test_a_timed_step_is_drawn(small):
    spans = (Span(lane="device", start=0.0, end=7.5, kind="kernels", signal="attn", phase="forward"),)
    panel = Panel(title="the step", trips=1, ms=10.0, spans=spans)
    text = page(dataclasses.replace(small, step_time_ms=10.0, timeline=(panel,)))
    assert re.search(r'<i class="kernels" style="left:0.00%;width:75.00%;--hue:\d+" title="attn, forward: 7.5 ms">attn</i>', text)
    assert "the step: 10 ms" in Reader(text).texts


def test_paths_of_this_machine_are_shortened(small):
    first, *others = small.collectives
    text = page(dataclasses.replace(small, collectives=(dataclasses.replace(first, source="/home/me/work/models/llama.py:12"), *others)))
    assert "models/llama.py:12" in Reader(text).texts and "/home/me" not in text


def test_columns_without_text_are_left_out(small):
    heads = [data for data in Reader(page(small)).texts if data in ("rule", "exposed ms", "signal")]
    assert "signal" in heads and "rule" not in heads


def test_a_plan_prints_as_the_command_shows_it(small, capsys):
    Report(small).print()
    assert str(small) == capsys.readouterr().out
    assert re.search(r"^Signals, for one device and step$", str(small), re.MULTILINE)
