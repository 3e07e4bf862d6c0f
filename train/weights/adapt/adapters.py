"""Adapters of a model, without a line in the model: a model whose matmuls read matrices with low-rank updates is a model once more.

The factors of an update are beside its matrix in the tree of parameters:

    layers/attn/q_proj/kernel    [layers, embed, heads · head]
    layers/attn/q_proj/lora_a    [layers, embed, rank]            uniform in ±1 / √embed
    layers/attn/q_proj/lora_b    [layers, rank, heads · head]     zero, so that training starts at the model as it is

So checkpoints, rules, meshes and pipelines treat them as they treat any parameter. They are trained, and all else is frozen
(`train.step.trained`). A parameter with another name than kernel has factors of that name: `gate_lora_a` beside `gate`.

With `model.base_dtype: nf4` or `int8` the frozen matrices are packed (`jgt.adapters.packed`), adapted or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jgt import Matrix, Packing, Rules, matches_end, path_text
from jgt.document import InputError, nearest

from ...models.model import Model, Use
from ...step.trained import Trained, divided
from .config import LoraConfig

TRAINED = ("*lora_{a,b}",)
"""The parameters that are trained."""
_VARIABLE = "lora"
"""The variable with the random key of dropout."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model. base: the model. matrices: the matrices with an update, by path. packed: those that are packed, by path.

    trained: the parameters that are trained, those of the adapters and others by their patterns.
    """

    config: LoraConfig
    base: Model
    matrices: Mapping[str, Matrix]
    packed: Mapping[str, Matrix]
    packing: Packing | None
    trained: Trained

    @staticmethod
    def of(
        model: Model, config: LoraConfig, call: Use, where: Callable[[str], str], *, train: tuple[str, ...] | None, base_dtype: str
    ) -> Adapters:
        """The adapters of a model. call: calls the module as in training. where(key): the place of a key. Raises InputError.

        train, base_dtype: `optimizer.train` and `model.base_dtype`.
        """
        shapes = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0))

        def run(params: Any, variables: Any) -> Any:
            return model.run(call, params, variables, True)

        # A vector of each expert has two dims, but is added.
        found = {m.path: m for m in Matrix.all_of(run, *shapes) if model.declared.get(m.path) != "vector"}
        paths = [path_text(path) for path, _ in jax.tree.leaves_with_path(shapes[0])]
        problems: list[str] = []
        chosen: dict[str, Matrix] = {}
        for pattern in config.modules:
            named = [path for path in paths if _names(pattern, path)]
            matrices = [found[path] for path in named if path in found]
            fitting = {m.path: m for m in matrices if not m.problem}
            chosen |= fitting
            if not named:
                near = nearest(pattern, _possible(found), lists=False)
                problems.append(
                    f"no module or parameter matches {pattern!r}. {near}{near and ' '}Modules: {', '.join(_modules(found)[:12])}"
                )
            elif not fitting:
                why = next((f"{m.path} {m.problem}" for m in matrices), f"{named[0]} is not a matrix")
                problems.append(f"{pattern!r} matches no matrix that can be adapted: {why}. {nearest(pattern, _possible(found))}")
        if problems:
            raise InputError([f"{where('lora.modules')}: lora.modules: {problem}" for problem in problems])
        trained, packing = Trained((*TRAINED, *(train or ()))), Packing.named(base_dtype)
        packed = {} if packing is None else {path: m for path, m in found.items() if not m.problem and packing.fits(m.shape)}
        packed = {path: matrix for path, matrix in packed.items() if not trained.has(path)}
        if packing is not None and not packed:
            why = "packs frozen matrices whose last dim is a multiple of 64, and there are none. Set bf16"
            raise InputError([f"{where('model.base_dtype')}: model.base_dtype: {base_dtype} {why}"])
        return Adapters(config=config, base=model, matrices=chosen, packed=packed, packing=packing, trained=trained)

    def rules(self, rules: Rules, batch: Collection[str]) -> Rules:
        """The rules, with those of the factors, which follow from the matrices', and of packed matrices. batch: the axes of the batch."""
        gathered = [rule for matrix in self.packed.values() for rule in matrix.gathered(rules, batch)]
        rules = replace(rules, signals=(*gathered, *rules.signals))
        return Matrix.with_rules(rules, {factors_of(path): matrix for path, matrix in self.matrices.items()})

    def packing_of(self, path: str) -> Packing | None:
        """How a parameter is packed; None for one that is not."""
        return self.packing if path in self.packed else None

    def divided(self, params: Any) -> tuple[Any, Any]:
        """The parameters of the base and of the adapters, of a tree by parameter."""
        own = {path for matrix in self.matrices for path in factors_of(matrix)}
        return divided(params, lambda path: path not in own)

    def merged(self, params: Any) -> Any:
        """The parameters of the base with the updates added, in their types; unpacked ones are f32."""
        base, own = self.divided(params)
        updates = self._updates(own)

        def add(path: Any, x: jax.Array) -> jax.Array:
            packing, update = self.packing_of(path_text(path)), updates.get(path_text(path))
            x = x if packing is None else packing.unpack(x)
            if update is None:
                return x
            return (x.astype(jnp.float32) + update.scale * update.matrix.product(update.a, update.b)).astype(x.dtype)

        return jax.tree.map_with_path(add, base)

    def packed_params(self, params: Any, shardings: Any = None) -> Any:
        """Parameters whose matrices are packed, where some are not. shardings: where each parameter goes; None in a trace."""

        def pack(path: Any, x: jax.Array, sharding: Any = None) -> jax.Array:
            packing = self.packing_of(path_text(path))
            if packing is None or x.dtype == jnp.uint8:
                return x
            return packing.pack(x) if sharding is None else jax.jit(packing.pack, out_shardings=sharding)(x)

        return jax.tree.map_with_path(pack, params, *([] if shardings is None else [shardings]))

    @property
    def model(self) -> Model:
        """The model with the adapters."""
        is_trained_differently = self.base.is_trained_differently or self.config.dropout > 0
        return replace(self.base, init=self._init, run=self._run, merged=self.merged, is_trained_differently=is_trained_differently)

    def _init(self, key: jax.Array) -> tuple[Any, Any]:
        params, variables = self.base.init(key)
        params = self.packed_params(params)
        for path, matrix in self.matrices.items():
            a, b = matrix.factor_shapes(self.config.rank)
            # As PEFT: kaiming_uniform with a = √5.
            bound = matrix.fan_in**-0.5
            values = (jax.random.uniform(_of_path(key, path), a, jnp.float32, -bound, bound), jnp.zeros(b, jnp.float32))
            for name, value in zip(factors_of(path), values, strict=True):
                params = _with(params, name.split("/"), value)
        if self.config.dropout:
            bits = jax.random.key_data(_of_path(key, _VARIABLE))
            variables = {**variables, _VARIABLE: {"key": bits, "count": jnp.zeros((), jnp.uint32)}}
        return params, variables

    def _run(self, use: Use, params: Any, variables: Any, is_training: bool) -> tuple[Any, Any]:
        base, own = self.divided(params)
        random = variables.get(_VARIABLE) if self.config.dropout else None
        rest = {name: x for name, x in variables.items() if name != _VARIABLE}
        if not own:
            # Merged.
            return self.base.run(use, base, rest, is_training)

        def run(base: Any, rest: Any) -> tuple[Any, Any]:
            return self.base.run(use, base, rest, is_training)

        result, after = Matrix.with_updates(run, self._updates(own, random if is_training else None), self._packings)(base, rest)
        if random is not None:
            after = {**after, _VARIABLE: {**random, "count": random["count"] + is_training}}
        return result, after

    @property
    def _packings(self) -> dict[str, Packing]:
        return {} if self.packing is None else dict.fromkeys(self.packed, self.packing)

    def _updates(self, own: Any, random: Mapping[str, jax.Array] | None = None) -> dict[str, Any]:
        """The updates by the paths of their matrices. own: the parameters of the adapters. random: see `_init`; None without dropout."""
        by_path = {path_text(path): x for path, x in jax.tree.leaves_with_path(own)}
        updates: dict[str, Any] = {}
        for path, matrix in self.matrices.items():
            a, b = (by_path[name] for name in factors_of(path))
            keys = None
            if random is not None:
                key = jax.random.fold_in(_of_path(jax.random.wrap_key_data(random["key"]), path), random["count"])
                keys = jax.random.key_data(jax.random.split(key, tuple(matrix.shape[n] for n in matrix.stack)))
            updates[path] = matrix.update(a, b, scale=self.config.scale, dropout=self.config.dropout, key=keys)
        return updates


def factors_of(path: str) -> tuple[str, str]:
    """The paths of A and B, from that of their matrix."""
    folder, _, name = path.rpartition("/")
    own = "" if name == "kernel" else f"{name}_"
    a, b = (f"{folder}/{own}lora_{factor}".removeprefix("/") for factor in "ab")
    return a, b


def _names(pattern: str, path: str) -> bool:
    """Whether a pattern names a parameter, or the module that it is a parameter of."""
    return matches_end(pattern, path) or ("/" in path and matches_end(pattern, path.rpartition("/")[0]))


def _possible(found: Mapping[str, Matrix]) -> list[str]:
    """Patterns of parameters that can be adapted: their modules and they."""
    return [*_modules(found), *(path for path, matrix in found.items() if not matrix.problem)]


def _modules(found: Mapping[str, Matrix]) -> list[str]:
    return list(dict.fromkeys(path.removesuffix("/kernel").rpartition("/")[2] for path, m in found.items() if not m.problem))


def _of_path(key: jax.Array, path: str) -> jax.Array:
    # By name, so that a matrix keeps its values when another one is adapted, too.
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def _with(tree: Any, names: Sequence[str], x: jax.Array) -> Any:
    """Nested dicts with one more leaf, in a dict that exists."""
    if len(names) == 1:
        return {**tree, names[0]: x}
    # The names of modules in a list are numbers.
    name = next(name for name in tree if str(name) == names[0])
    return {**tree, name: _with(tree[name], names[1:], x)}
