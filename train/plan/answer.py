"""The answer of a search for people, for programs and for the trainer: a table, JSON, and a run's file."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jgt import Console
from jgt.document import Node, dump, override, read

from ..files.disk import replaced
from .search.plans import RunFile
from .search.search import LayoutSearch, PlannedLayout

_HEADROOM = 1.05
"""The factor by which the budget of a written file exceeds its own plan."""


def print_answer(search: LayoutSearch, name: str, *, batch_tokens: int) -> None:
    """The best layouts and why the others are slower, what was left out, and how good the estimates were."""
    console, ranked = Console(), search.ranked()
    memory = search.target.chip.hbm_gb
    columns = ("", "layout", "s", "estimated", "tokens/s", f"GB of {memory:.0f}", "waits s", "bubble", "why not")
    table = Console.table(f"{name} on {search.target.text}", columns, 2)
    table.columns[-1].justify = "left"
    for rank, one in enumerate(ranked[: search.top], 1):
        table.add_row(*_row(rank, one, ranked[0], batch_tokens))
    console.print(table)
    for line in _notes(search):
        console.print(line)


def _row(rank: int, one: PlannedLayout, best: PlannedLayout, batch_tokens: int) -> list[str]:
    plan, estimate = one.plan, one.estimate
    return [
        str(rank),
        one.candidate.text,
        f"{plan.seconds:.3g}",
        "" if estimate is None else f"{estimate.seconds:.3g}",
        f"{batch_tokens / plan.seconds:,.0f}",
        f"{plan.peak_bytes / 1e9:.1f}",
        waits_text(plan.exposed or {}),
        "" if estimate is None or not estimate.bubble else f"{estimate.bubble:.0%}",
        "" if one is best else one.why_slower(best),
    ]


def waits_text(exposed: Mapping[str, float]) -> str:
    """The axes that a device waits for most: `tensor 1.2, fsdp 0.3`."""
    notable = sorted(((seconds, axes) for axes, seconds in exposed.items() if seconds >= 0.001), reverse=True)[:2]
    return ", ".join(f"{axes} {seconds:.2g}" for seconds, axes in notable) or "none"


def _notes(search: LayoutSearch) -> Iterator[str]:
    refused = [t for t in search.tries if t.plan.problems]
    too_large = [t for t in search.tries if not t.plan.problems and not t.plan.fits]
    pruned = search.pruned()
    parts = [f"{count:,} {reason}" for reason, count in sorted(pruned.items(), key=lambda item: -item[1])]
    planned = f"{len(search.tries)} of {len(search.space):,} layouts were planned ({search.plans.num_found} from the cache)"
    yield f"{planned}; not planned: {'; '.join(parts) or 'none'}"
    if too_large:
        nearest = min(too_large, key=lambda t: t.plan.peak_bytes)
        what = "1 layout does not fit" if len(too_large) == 1 else f"{len(too_large)} layouts do not fit"
        limit, size = search.target.usable_bytes / 1e9, nearest.plan.peak_bytes / 1e9
        yield f"{what} ({limit:.0f} GB usable); the closest needs {size:.0f} GB: {nearest.candidate.text}"
    if refused:
        yield f"{len(refused)} were refused, such as {refused[0].candidate.text}: {refused[0].plan.problems[0]}"
    errors = accuracy(search.tries)
    if errors:
        yield f"The estimates differ from their plans by {errors['time']:.0%} in time and {errors['memory']:.0%} in memory (medians)"


def accuracy(tries: Sequence[PlannedLayout]) -> dict[str, float]:
    """The median relative errors of the estimates of layouts that fit; empty without any."""
    known = [t for t in tries if t.estimate is not None and t.plan.is_usable]
    if not known:
        return {}
    return {
        "time": statistics.median(abs(t.estimate.seconds / t.plan.seconds - 1) for t in known if t.estimate),
        "memory": statistics.median(abs(t.estimate.peak_bytes / t.plan.peak_bytes - 1) for t in known if t.estimate),
    }


def answer_json(search: LayoutSearch, batch_tokens: int) -> dict[str, object]:
    """The answer as plain values. Seconds and bytes are one device's in a step."""

    def one(t: PlannedLayout) -> dict[str, object]:
        values = {"layout": t.candidate.text, **t.candidate.to_document(), "plan": asdict(t.plan)}
        estimate = None if t.estimate is None else {"seconds": t.estimate.seconds, "peak_bytes": round(t.estimate.peak_bytes)}
        return {**values, "estimate": estimate, "tokens_per_s": batch_tokens / t.plan.seconds if t.plan.seconds else None}

    others = [t for t in search.tries if not t.plan.is_usable]
    return {
        "version": 1,
        "target": search.target.text,
        "layouts": len(search.space),
        "best": [one(t) for t in search.ranked()],
        "others": [one(t) for t in others],
        "pruned": search.pruned(),
        "accuracy": accuracy(search.tries),
    }


# -- a run's file ----------------------------------------------------------------------------------------------------------


def run_document(file: RunFile, best: PlannedLayout, folder: Path) -> dict[str, object]:
    """A run's file with the best layout, which extends the user's file and contains the command line's overrides.

    folder: the folder of the file that will be written, to which the path of the user's file is relative.
    """
    root, extended, layout = Node({}, "search"), read(file.config), best.candidate.to_document()
    for assignment in file.overrides:
        root = override(root, assignment)
    base = Path(os.path.relpath(Path(file.config).resolve(), folder.resolve())).as_posix()
    document: dict[str, Any] = {"extends": base, **root.plain()}
    for key in ("mesh", "pipeline"):
        document[key] = _replacing(extended.children.get(key), layout.get(key))
    if "rules" in layout:
        document["rules"] = layout["rules"]
    elif document.get("rules", 0) is None:
        del document["rules"]
    document["train"] = {**(document.get("train") or {}), **layout["train"]}
    plan = best.plan
    document["budget"] = {"peak_gb": _rounded(plan.peak_bytes / 1e9 * _HEADROOM), "step_ms": _rounded(plan.seconds * 1e3 * _HEADROOM)}
    return {key: value for key, value in document.items() if value is not None or key in extended.children}


def write_run(path: Path, document: Mapping[str, object], best: PlannedLayout, target: str) -> None:
    """Writes the file. Raises OSError."""
    plan = best.plan
    head = [
        f"# The best layout that a search found for {target}: {plan.seconds:.3g} s a step and {plan.peak_bytes / 1e9:.1f} GB by its plan.",
        f"#   jgt plan {path.name} --target {target}",
    ]
    with replaced(path) as new:
        new.write_text("\n".join(head) + "\n" + dump(dict(document)))


def _replacing(node: Node | None, values: Mapping[str, object] | None) -> dict[str, object] | None:
    """Values that replace a mapping of the file that is extended: keys that it has and they have not become null."""
    if values is None:
        return None
    before = dict.fromkeys(node.children) if node is not None and isinstance(node.value, dict) else {}
    return {**before, **values}


def _rounded(value: float) -> float:
    """Rounded up to three digits."""
    scale = 10 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / scale) * scale:.6g}")
