"""Plans of generation: the time and the memory of reading prompts and of writing a token, by the two programs that do it.

Prompts are read into a cache of their own, which is then copied into the cache of the batch. Both are in memory meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import jgt
from jgt import Console, Plan, amount
from jgt.planner import Target, Workload, described_device

from ..config import Run
from ..files.streams import say
from ..generate.batch import draw_settings_of
from ..generate.generate import programs_of
from ..generate.rules import rules_of
from ..models.cache import Cache, KeysValues, kinds_of
from ..models.config import ModelConfig
from ..setup.layout import mesh_layout
from ..setup.xla import planned_flags
from ..step.state import Tree
from .make import num_devices_of, setup_maker
from .request import Texts


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """The plans of reading the prompts of a batch, and of writing one token of each of its texts.

    texts: with as many rows as the mesh can split. slots: the tokens of a text that the cache has room for. rules: a sentence about the
    rules. state_bytes: the batch's state on a device. cache_bytes: the cache on a device as XLA counts it; formula_bytes: as it should
    be; None for a model of the user's own.
    """

    texts: Texts
    slots: int
    rules: str
    prefill: Plan
    token: Plan
    state_bytes: int
    cache_bytes: int
    formula_bytes: int | None

    @property
    def peak_bytes(self) -> tuple[int, int]:
        """The most memory of one device, while prompts are read and while tokens are written."""
        return self.prefill.memory.peak_bytes + self.state_bytes, self.token.memory.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether both leave 5 % of the memory free; None without a target."""
        return replace(self.token.memory, peak_bytes=max(self.peak_bytes)).fits

    def to_json(self) -> dict[str, object]:
        """Plain values, for `json.dumps`."""
        return {
            "batch": self.texts.rows,
            "length": self.texts.length,
            "prompt_length": self.texts.prompt,
            "slots": self.slots,
            "rules": self.rules,
            "prefill_ms": self.prefill.step_time_ms,
            "token_ms": self.token.step_time_ms,
            "tokens_per_s": None if self.token.speed is None else self.token.speed.tokens_per_s,
            "cache_bytes": self.cache_bytes,
            "cache_formula_bytes": self.formula_bytes,
            "peak_bytes": max(self.peak_bytes),
            "fits": self.fits,
            "prefill": self.prefill.to_json(),
            "token": self.token.to_json(),
        }


def make_generation(run: Run, target: Target | None, texts: Texts, *, price: float | None = None) -> GenerationPlan:
    """Plans generation with a run's model, without a target for the run's CPU devices.

    price: dollars for an hour of one device. Raises InputError if there are fewer devices, or if rules, mesh and shapes do not fit.
    """
    jax.config.update("jax_platforms", "cpu")
    count = num_devices_of(run) if target is None else target.num_devices
    rules, batch = rules_of(run, mesh_layout(run, num_devices=count).mesh.shape)
    setup = setup_maker(replace(run, rules=rules), target, partial_rules=True)(None)
    described = target if target is not None and target.is_described else None
    with contextlib.nullcontext() if described is None else described_device(described):
        programs = programs_of(setup)
        rows, slots = programs.rows(texts.rows), programs.caching.slots(texts.length)
        params, variables = programs.layout(*setup.program.shapes[:2])
        state = programs.state(params, variables, rows, slots)
    flags, warnings = planned_flags(run.config, has_gpu=described is not None)
    for warning in warnings:
        say(warning)

    def planned(program: Callable[..., object], *arguments: object, tokens: int) -> Plan:
        work = Workload(tokens=tokens, price=price)
        return jgt.plan(program, params, variables, *arguments, target=target, rules=programs.rules, flags=flags, workload=work)

    shapes = (rows, programs.caching.padded(texts.prompt)), (rows,), ()
    prompts, settings = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes], draw_settings_of([None] * rows)
    token = planned(programs.write, state, settings, tokens=rows)
    others = _local_bytes((params, variables, state._replace(cache=()), settings))
    return GenerationPlan(
        texts=replace(texts, rows=rows),
        slots=slots,
        rules=_rules_text(run, [axis for axis in batch if setup.mesh.shape.get(axis, 1) > 1]),
        prefill=planned(functools.partial(programs.read, slots=slots), *prompts, tokens=rows * texts.prompt),
        token=token,
        state_bytes=_local_bytes(state),
        cache_bytes=token.memory.args_bytes - others,
        formula_bytes=_formula_bytes(run.config.model, state.cache, rows, slots) if isinstance(run.config.model, ModelConfig) else None,
    )


def _rules_text(run: Run, batch: Sequence[str]) -> str:
    """The rules of generation in words. batch: the axes that split rows."""
    if run.config.generate.rules is not None:
        return f"generate.rules {run.config.generate.rules}"
    node = run.config.rules
    if node is None:
        return "none, so each device has the whole model and its rows"
    name = node.value if isinstance(node.value, str) else f"of {node.where}"
    axes = [axis for axis in batch if axis in run.rules.axes_of_parameters()]
    return f"{name}, with parameters that are not split over {' and '.join(axes)}" if axes else str(name)


def _local_bytes(tree: Tree | Cache) -> int:
    """The bytes of arrays on one device."""
    return sum(math.prod(_local_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _local_shape(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    sharding = getattr(x, "sharding", None)
    return x.shape if sharding is None else sharding.shard_shape(x.shape)


def _formula_bytes(config: ModelConfig, cache: Cache, rows: int, slots: int) -> int:
    """The bytes of a decoder's cache on one device: `kept_sizes` numbers for each layer and token, states, and the step."""
    (full, windowed, _), (heads, *widths) = kinds_of(config), config.kept_sizes

    def stack(arrays: KeysValues | None, layers: int, tokens: int) -> int:
        if arrays is None:
            return 0
        shards = math.prod(arrays.keys.shape) // math.prod(_local_shape(arrays.keys))
        numbers = layers * rows * tokens * heads * sum(widths)
        return numbers * arrays.keys.dtype.itemsize // shards

    states = _local_bytes(cache._replace(full=None, window=None)) - 4
    return stack(cache.full, len(full), slots) + stack(cache.window, len(windowed), min(slots, config.window or slots)) + states + 4


# -- for a person ----------------------------------------------------------------------------------------------------------


def print_generation(plan: GenerationPlan) -> None:
    """Writes a plan to stdout, for a person."""
    console, texts, token = Console(), plan.texts, plan.token
    mesh = " x ".join(f"{axis} {size}" for axis, size in token.mesh.items())
    what = f"{texts.rows} texts of {texts.length:,} tokens, with prompts of {texts.prompt:,} tokens"
    console.print(f"Generation on {token.target}: {mesh} = {token.devices} devices, {what}", style="bold")
    for line in (f"rules: {plan.rules}", *_speed_lines(plan)):
        console.print(line, soft_wrap=True)
    for table in (
        Console.table("Memory of one device", ["memory", "prefill", "a token"], 1, _memory_rows(plan)),
        Console.table("Sent by one device", ["signal", "collective", "sent over", "prefill", "a token"], 3, _sent_rows(plan)),
    ):
        if table.row_count:
            console.print(table)
    for line in token.assumptions:
        console.print(line, style="dim", soft_wrap=True)


def _speed_lines(plan: GenerationPlan) -> Iterator[str]:
    for name, one in (("prefill", plan.prefill), ("a token", plan.token)):
        if one.step_time_ms is None or one.speed is None:
            continue
        if one.step_time_caveat:
            yield f"{name}: the time has no meaning: {one.step_time_caveat}"
            continue
        cost = one.speed.dollars_per_million_tokens
        price = "" if cost is None else f", ${cost:.2g} for a million tokens"
        yield f"{name}: {amount(one.step_time_ms / 1e3, 's')}, {amount(one.speed.tokens_per_s or 0)} tokens/s{price}"


def _memory_rows(plan: GenerationPlan) -> Iterator[Sequence[str]]:
    prefill, token = plan.prefill.memory, plan.token.memory
    parameters = [memory.args_bytes - memory.groups.get("inputs", 0) for memory in (prefill, token)]
    formula = "" if plan.formula_bytes is None else f" (formula: {amount(plan.formula_bytes, 'B')})"
    rows = {
        "parameters": parameters,
        f"cache{formula}": [plan.cache_bytes, plan.cache_bytes],
        "cache of the prompts, logits": [prefill.output_bytes, 0],
        "temporary": [prefill.temp_bytes, token.temp_bytes],
        "peak": [*plan.peak_bytes],
    }
    for name, sizes in rows.items():
        yield name, *(amount(size, "B") if size else "" for size in sizes)
    if token.hbm_bytes is not None:
        verdict = "fits" if plan.fits else "DOES NOT FIT"
        yield f"of {amount(token.hbm_bytes, 'B')}", "", verdict


def _sent_rows(plan: GenerationPlan) -> Iterator[Sequence[str]]:
    sent: list[Counter[tuple[str, str, str]]] = [Counter(), Counter()]
    for counter, one in zip(sent, (plan.prefill, plan.token), strict=True):
        for row in one.collectives:
            counter[row.signal, row.kind, "+".join(row.axes) or "(none)"] += row.total_bytes
    for key in sorted({*sent[0], *sent[1]}, key=lambda key: (-sent[1][key], -sent[0][key], key)):
        yield (*key, *(amount(counter[key], "B") if counter[key] else "" for counter in sent))
