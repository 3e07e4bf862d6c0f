"""The site of the documentation: every page has a place in its navigation, and its reference is complete."""

import html
import json
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import jgt
from train.config import schema

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "site"))
import pages  # noqa: E402

PAGES = sorted(path for pattern in ("*.md", "notebooks/*.ipynb") for path in (ROOT / "docs").glob(pattern))


class _Loader(yaml.SafeLoader):
    """Reads tags of MkDocs as nothing."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def leaves(nav):
    """The pages of a navigation, in order."""
    for entry in nav:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from [value] if isinstance(value, str) else leaves(value)


def test_the_navigation_has_every_page_once():
    listed = list(leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    assert len(listed) == len(set(listed))
    made = {"overview.md", "changelog.md", "contributing.md", "files/deploy/README.md"}
    made |= {f"reference/{name}.md" for name in ("run", "rules", "python")}
    assert set(listed) == made | {pages.page_of(str(path.relative_to(ROOT))) for path in PAGES}


@pytest.mark.parametrize(
    ("path", "text", "moved"),
    [
        ("README.md", "[a](docs/rules.md#extends)", "[a](rules.md#extends)"),
        ("docs/plan.md", "[a](../README.md) [b](#here) [c](https://x.org)", "[a](overview.md) [b](#here) [c](https://x.org)"),
        ("docs/plan.md", "[a](../configs/gpu.yaml)", "[a](files/configs/gpu.yaml.md)"),
        ("deploy/README.md", "[a](../docs/training.md)", "[a](../../training.md)"),
        ("CONTRIBUTING.md", "[a](.github/x.yml)", "[a](files/github/x.yml.md)"),
        ("docs/plan.md", "[a](pictures/rooms.py) ![b](pictures/a.svg)", "[a](files/docs/pictures/rooms.py.md) ![b](pictures/a.svg)"),
        ("docs/plan.md", "```\n[a](../x)\n```", "```\n[a](../x)\n```"),
        ("docs/plan.md", r"| `a\|b` | \| |", r"| `a|b` | \| |"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(path, text, moved):
    assert pages.for_site(text, path) == moved


def test_the_reference_has_every_public_name():
    text = pages.api_page()
    assert {f"jgt.{name}" for name in jgt.__all__ if name != "signal"} <= set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    assert {"jgt.signal.context", "jgt.signal.tensor", "train.run.api.RunResult"} <= set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


def keys(node, prefix=""):
    """All keys of a schema, with those inside of others."""
    for form in pages.forms(node):
        for name, value in form.get("properties", {}).items():
            yield prefix + name
            yield from keys(value, f"{prefix}{name}.")


@pytest.mark.parametrize("name", ["run", "rules"])
def test_the_reference_has_every_key(name):
    text = pages.keys_page(name, "Keys", "")
    described = schema.schemas()[name]
    assert len(described["properties"]) > 4
    for section, value in described["properties"].items():
        part = text.split(f"\n## {section}\n", 1)[1].split("\n## ")[0]
        assert set(keys(value)) == set(re.findall(r"^\| `([^`]+)` ", part, re.MULTILINE))
    assert not re.findall(r"^\| `([^`]+)`.*\|  \|$", text, re.MULTILINE), "keys without a meaning"


def test_a_version_is_the_same_wherever_it_stands():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == jgt.__version__
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings and all(re.fullmatch(r"Unreleased|\d+\.\d+\.\d+ - \d{4}-\d{2}-\d{2}", heading) for heading in headings)


WORDS = re.split(
    r",\s+",
    """gradient checkpointing, activation checkpointing, rematerialization, mixed precision, AMP, bf16, fp8, freeze, DDP, FSDP,
    ZeRO-1, ZeRO-3, HSDP, tensor parallelism, pipeline parallelism, 1F1B, expert parallelism, MoE, label smoothing, export, LoRA,
    PEFT, adapter, S3, bucket, gradient clipping, gradient accumulation, warm-up, learning rate, weight decay, resume,
    checkpoint, multi-node, multi-GPU, Slurm, Kubernetes, preemption, out of memory, OOM, NaN, hang, watchdog, profiler, MFU,
    tokens per second, batch size, epoch, perplexity, evaluation, tokenizer, chat template, SFT, DPO, distillation, dropout, EMA,
    seed, determinism, streaming, data mixture, packing, flash attention, KV cache, generate, serving, vLLM, quantization,
    notebook, sweep, wandb, TensorBoard, Muon, AdamW, torch.compile, recompilation, no GPU, offload, DiLoCo, mesh, sharding,
    convert weights, context length, contrastive loss, elastic, goodput, callbacks, hooks, early stopping, best checkpoint""",
)


def test_the_words_that_people_search_are_explained():
    page = (ROOT / "docs" / "glossary.md").read_text().lower()
    headings = " ".join(re.findall(r"^### (.*)", page, re.MULTILINE))
    explained = {word: word.lower() in headings or word.lower() in page for word in WORDS}
    assert len(WORDS) >= 80 and not [word for word, found in explained.items() if not found]


def test_every_word_has_one_sentence_and_a_link():
    _, *entries = (ROOT / "docs" / "glossary.md").read_text().split("\n### ")
    headings = [entry.split("\n")[0].lower() for entry in entries]
    assert headings == sorted(headings)
    for entry in entries:
        assert "](" in entry and len(re.findall(r"[.:;] [A-Z]", entry.split("\n", 1)[1])) <= 1, entry


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("material"), reason="needs the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path, monkeypatch):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("DISABLE_MKDOCS_2_WARNING", "true")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())
    found = {entry["location"].split("/")[0] for entry in index["docs"]}
    assert {path.stem for path in PAGES} - {"index"} <= found | {"notebooks"} and "files" in found
    reference = {entry["location"].partition("#")[2] for entry in index["docs"] if entry["location"].startswith("reference/python/#")}
    assert {f"jgt.{name}" for name in jgt.__all__ if name != "signal"} <= reference
    assert not list(broken_links(tmp_path / "site"))


def broken_links(site):
    """The links of built pages that lead to no file or to no anchor of it."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\sid="?([^"\s>]+)', text)) for path, text in texts.items()}
    for path, text in texts.items():
        for target in re.findall(r'\s(?:href|src)="([^"]*)"', text):
            place, _, anchor = html.unescape(target).partition("#")
            # The page for wrong addresses has links from the root of the server.
            if "://" in place or place.startswith(("mailto:", "data:", "/")):
                continue
            file = (path.parent / place).resolve() if place else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or (anchor and file in anchors and unquote(anchor) not in anchors[file]):
                yield f"{path.relative_to(site)}: {target}"
