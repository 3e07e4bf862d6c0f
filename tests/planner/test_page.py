"""The page of a plan loads nothing, contains everything, escapes what it shows, and sorts its tables."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import jgt
from jgt.planner.findings import Finding
from jgt.planner.plan import plan
from jgt.planner.step.spans import Panel, Span
from jgt.planner.view.page import page, write_page
from jgt.signal import context

CHROMIUM = shutil.which("chromium", path="/usr/bin")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=2000", "--dump-dom"]
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
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text.replace("// A click", ""))
    tags = Reader(text).tags
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [
        attrs for _, attrs in tags if attrs.keys() & {"src", "href", "srcset", "action"} or any(name.startswith("on") for name in attrs)
    ]


def test_the_page_shows_every_signal_and_collective(small):
    texts = Reader(page(small)).texts
    assert {row.signal for row in small.signals} >= {"attn", "mlp"}
    for row in small.signals:
        # A bar, and a row of the table.
        assert texts.count(row.signal) >= 2
    assert {c.source for c in small.collectives} <= set(texts)
    assert "data 2 x tensor 4 = 8 devices; inside a host: data, tensor" in texts


def test_the_json_inside_is_the_plan(small, tmp_path):
    write_page(small, tmp_path / "plan.html")
    assert data_of((tmp_path / "plan.html").read_text(encoding="utf-8")) == json.loads(json.dumps(small.to_json()))


def test_hostile_names_are_escaped(hostile):
    text = page(hostile)
    reader = Reader(text)
    assert "<img" not in text and text.count("</script>") == 2
    assert not {tag for tag, _ in reader.tags} & {"img", "a"}
    assert HOSTILE in reader.texts
    assert f"{HOSTILE}: attn: too much" in reader.texts
    assert data_of(text)["collectives"][0]["source"] == HOSTILE


def test_a_timed_step_is_drawn_and_one_that_does_not_fit_is_not(small):
    spans = (Span(lane="device", start=0.0, end=7.5, kind="kernels", signal="attn", phase="forward"),)
    panel = Panel(title="the step", trips=1, ms=10.0, spans=spans)
    timed = dataclasses.replace(
        small, step_time_ms=10.0, parts_ms={"matmul": 7.5, "exposed": 2.5}, exposed_ms={"tensor": 2.5}, timeline=(panel,)
    )
    text = page(timed)
    assert 'class="c' in text and 'style="left:0.00%;width:75.00%" title="attn, forward: 7.5 ms"' in text
    texts = Reader(text).texts
    assert "waiting for tensor " in texts and "10 ms" in texts
    texts = Reader(page(dataclasses.replace(timed, step_time_caveat="it is too large"))).texts
    assert "The time has no meaning: it is too large" in texts and "waiting for tensor " not in texts


def test_paths_of_this_machine_are_shortened(small):
    first, *others = small.collectives
    text = page(dataclasses.replace(small, collectives=(dataclasses.replace(first, source="/home/me/work/models/llama.py:12"), *others)))
    assert "models/llama.py:12" in Reader(text).texts and "/home/me" not in text


def test_columns_without_text_are_left_out(small):
    heads = [data for data in Reader(page(small)).texts if data in ("rule", "ms", "signal")]
    assert "signal" in heads and "rule" not in heads


# ---------------------------------------------------------------------------------------------- in a browser

SORT = """<pre id="seen"></pre><script>
const table = document.getElementById("collectives"), seen = {};
const column = (name) => [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.trim() === name);
const keys = (name) => [...table.tBodies[0].rows].map((row) => row.cells[column(name)].dataset.key);
for (const [name, step] of [["total", "first"], ["total", "second"], ["signal", "third"]]) {
  table.tHead.rows[0].cells[column(name)].querySelector("button").click();
  seen[step] = keys(name);
}
seen.marked = [...table.querySelectorAll("[aria-sort]")].map((head) => [head.textContent, head.getAttribute("aria-sort")]);
seen.images = document.images.length;
document.getElementById("seen").textContent = JSON.stringify(seen);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_tables_sort_both_ways_in_a_browser(hostile, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(page(hostile).replace("</body>", f"{SORT}</body>"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    seen = json.loads(text)
    totals = [c.total_bytes for c in hostile.collectives]
    assert len(set(totals)) > 1
    assert [int(x) for x in seen["first"]] == sorted(totals, reverse=True)
    assert [int(x) for x in seen["second"]] == sorted(totals)
    assert seen["third"] == sorted(c.signal for c in hostile.collectives)
    assert seen["marked"] == [["signal", "ascending"]]
    assert seen["images"] == 0
