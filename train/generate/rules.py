"""The rules by which a model generates, from those by which it is trained.

A step of generation reads all weights for one token of each row, so weights that a training step gathers are gathered once, before the
first token. Three things differ from training:

- Parameters are not split over the axes of the batch, as FSDP splits them. Experts stay where their rule has them.
- A step has one token of each row, so nothing but a cache is split along the sequence.
- The cache [b, n, k, h] is laid out by the rules of the tensors `k_cache` and `v_cache`; without any it is as `k` and `v` are. Axes that
  do not divide the key/value heads do not split them. That of latent attention has one head, and `k` and `v` have all of them. The states
  of linear attention are split by its heads of keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jgt import Rules, make_rules
from jgt.document import read

from ..config import Run
from ..models.config import ModelConfig

_ATTENTION = "layers/attn"
_KEYS = ("k", "v")
Axes = tuple[str, ...]


def rules_of(run: Run, mesh: Mapping[str, int], *, gathers: bool = False) -> tuple[Rules, Axes]:
    """The rules by which the model of a run generates, and the axes that split rows. gathers: parameters remain split as in training.

    Raises InputError if `generate.rules` cannot be read.
    """
    path, model = run.config.generate.rules, run.config.model
    rules = run.rules if path is None or gathers else make_rules(read(path, Rules.FOLDER))
    found = rules.match_input("batch/inputs", 2).rule
    batch = () if found is None else found.dims(2)[0]
    kv_heads = (model.kept_sizes[0], model.num_kv_heads) if isinstance(model, ModelConfig) else None
    linear = model.linear.num_key_heads if isinstance(model, ModelConfig) and model.linear is not None else 1
    return generation_rules(rules, batch, mesh, kv_heads, linear, gathers=gathers), batch


def generation_rules(
    rules: Rules, batch: Axes, mesh: Mapping[str, int], kv_heads: tuple[int, int] | None, linear_heads: int = 1, *, gathers: bool = False
) -> Rules:
    """The rules of generation. batch: the axes that split rows.

    kv_heads: the number of heads in the cache of a decoder, and of key and value heads; None for a model of another kind. linear_heads:
    the number of key heads of linear attention. gathers: parameters remain split as in training.
    """
    gathered = () if gathers else batch
    signals = tuple(_of_one_token(rule, gathered) for rule in rules.signals)
    params = tuple(_without(spec, gathered) for spec in rules.params)
    named = tuple(spec for spec in rules.inputs if "cache" in spec.pattern)
    tree: dict[str, Any] = {"inputs": {"tokens": [[*batch], ...], "lengths": [[*batch]], "cache/**": [[*batch], ...]}}
    if kv_heads is not None:
        in_cache, of_keys = kv_heads
        layout = {name: _layout(rules, name, batch, mesh, in_cache) for name in _KEYS}
        others = _of_keys(rules, layout) if in_cache == of_keys else {}
        tree["signals"] = {_ATTENTION: {"tensors": {f"{name}_cache": spec for name, spec in layout.items()} | others}}
        stacks = {f"cache/full/{n}": _of_stack(layout[name]) for n, name in zip(("keys", "values"), _KEYS, strict=True)}
        # The slots of a window need not be divisible.
        windows = {path.replace("full", "window"): [*spec[:3], None, *spec[4:]] for path, spec in stacks.items()}
        heads = _layout(rules, "k", batch, mesh, linear_heads)[2]
        states = {f"cache/linear/{name}": [None, [*batch], None, heads] for name in ("q", "k", "v")}
        states |= {"cache/linear/matrices": [None, [*batch], heads, None, None, None]}
        tree["inputs"] = {**stacks, **windows, **states, **tree["inputs"]}
    own = make_rules({**tree, "default": "replicate"})
    inputs = (*named, *own.inputs, *rules.inputs)
    return replace(rules, signals=(*own.signals, *signals), params=params, optimizer=(), inputs=inputs, default="replicate", otherwise=None)


def _of_one_token(rule: Any, gathered: Axes) -> Any:
    """A signal's rule without what it says of the sequence, and with parameters that are not split over the axes `gathered`."""
    axes = [axis for axis in gathered if rule.experts is None or axis != rule.experts.axis]
    return replace(
        rule,
        params=tuple(_without(spec, axes) for spec in rule.params),
        tensors=tuple(_whole_sequence(spec) for spec in rule.tensors),
        out=None if rule.out is None else _whole_sequence(rule.out),
        optimizer=(),
        backward=None,
        save=(),
        overlap=None,
        context=None,
    )


def _without(spec: Any, axes: Collection[str]) -> Any:
    return replace(spec, spec=tuple(entry if entry is ... else tuple(a for a in entry if a not in axes) for entry in spec.spec))


def _whole_sequence(spec: Any) -> Any:
    """A spec of activations [rows, sequence, ...] that does not split the sequence."""
    if spec.rank < 3 or ... in spec.spec[:2] or "cache" in spec.pattern:
        return spec
    return replace(spec, spec=(spec.spec[0], (), *spec.spec[2:]))


def _layout(rules: Rules, name: str, batch: Axes, mesh: Mapping[str, int], kv_heads: int) -> list[list[str]]:
    """The axes of the dims [b, n, k, h] of a cache."""
    dims = _dims_of(rules, f"{name}_cache")
    if dims is None:
        dims = _dims_of(rules, name) or (batch, (), (), ())
        dims = (dims[0], (), *dims[2:])
    return [[*dims[0]], [*dims[1]], _fitting(dims[2], mesh, kv_heads), [*dims[3]]]


def _of_stack(dims: list[list[str]]) -> list[list[str] | None]:
    """The axes of a stack [L, b, k, n, h] from those of a cache [b, n, k, h]."""
    rows, slots, heads, elements = dims
    return [None, rows, heads, slots, elements]


def _of_keys(rules: Rules, layout: Mapping[str, list[list[str]]]) -> dict[str, object]:
    """The specs of `k` and `v`, where rules have any, with the heads of their caches."""
    dims = {name: _dims_of(rules, name) for name in _KEYS}
    return {name: [[*found[0]], None, layout[name][2] if found[2] else None, None] for name, found in dims.items() if found is not None}


def _dims_of(rules: Rules, name: str) -> tuple[Axes, ...] | None:
    specs = (spec for rule in rules.signals if rule.covers(_ATTENTION) for spec in rule.tensors)
    found = Rules(inputs=tuple(specs)).match_input(name, 4).rule
    return None if found is None else found.dims(4)


def _fitting(axes: Axes, mesh: Mapping[str, int], size: int) -> list[str]:
    return [*axes] if size % math.prod(mesh.get(axis, 1) for axis in axes) == 0 else []
