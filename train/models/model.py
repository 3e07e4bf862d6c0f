"""A model as pure functions of plain arrays, whichever Flax API it is written in.

A module of nnx contains its arrays, and one of linen is given them. The rest of the trainer knows neither: to it a model is two trees of
arrays and a way to run a function with them. `params` are the parameters, which have gradients. `variables` are everything else that the
module keeps from step to step: the running statistics of a BatchNorm, the keys and counters of dropout. A run stores both.

    params, variables = model.init(key)
    result, variables = model.run(lambda module: module(x), params, variables, is_training=True)

Both trees are nested dicts. Random keys are stored as bits, because checkpoints have no type for them.

An optimizer needs one fact more of each parameter, its role: should Muon orthogonalise it, and should it decay? A name cannot answer: a
matrix that someone calls `weight` instead of `kernel` would miss Muon without a word. So a role is declared by the parameter's type or its
module, and otherwise follows from the parameter's rank where it is used, within one layer:

    role      Muon updates it   it decays   which
    matrix    yes               yes         rank 2 or more; the last two dims are the matrix, the others stack matrices
    table     no, AdamW         yes         declared as Table, or in an Embed of Flax
    vector    no, AdamW         no          declared as Vector, or of rank 0 or 1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.errors import InvalidRngError

Role = Literal["matrix", "table", "vector"]
PLACES = ("segments", "positions")
"""Arrays of a batch that say where tokens are: where their document begins, and where they are in the row (`train.models.tokens.Rows`)."""
Use = Callable[[Any], Any]
"""A function of a module with its arrays, such as its call on a batch. Its results are trees of arrays."""


Terms = dict[str, tuple[jax.Array, float]]
"""Terms that a model adds to the loss while it is trained, by name: a mean over the batch at hand, and its factor."""


class Table(nnx.Param):
    """Rows that are looked up or scored, such as an embedding [vocab, embed]."""


class Vector(nnx.Param):
    """A parameter that is added or multiplied element by element: learned positions [seq, embed] are one vector a position."""


class LostError(Exception):
    """Something was written into a model that does not outlive the step."""


Settle = Callable[[Any], tuple[Any, dict[str, jax.Array]]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model without its arrays.

    init(key) → params and variables. run(use, params, variables, is_training) → the result of `use` and the variables after it. declared:
    by path, the roles that do not follow from a parameter's rank. has_features: whether the module has `features` (see
    `train.step.loss.make_loss`). takes: which of `PLACES` the module takes.
    has_cache: whether the module can compute one token at a time (`train.generate.caching`).
    is_trained_differently: whether `is_training` makes a difference, or there are terms. terms(module): the terms of a module that was
    called. merged(params) → the module's own parameters, to which those of adapters are added. settle(variables) → the variables after a
    step, and metrics of the step, from those that the step's calls have left.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    run: Callable[[Use, Any, Any, bool], tuple[Any, Any]]
    declared: Mapping[str, Role] = field(default_factory=dict[str, Role])
    has_features: bool
    takes: frozenset[str]
    has_cache: bool
    is_trained_differently: bool
    terms: Callable[[Any], Terms] = lambda module: {}
    settle: Settle = lambda variables: (variables, {})
    merged: Callable[[Any], Any] = lambda params: params

    def module(self, params: Any, variables: Any) -> Any:
        """The module with these arrays, as in an evaluation: an nnx.Module, or a bound module of linen."""
        return self.run(lambda module: module, self.merged(params), variables, False)[0]

    def apply(self, params: Any, variables: Any, tokens: jax.Array) -> jax.Array:
        """The module called on tokens, as in an evaluation."""
        return self.run(lambda module: module(tokens), params, variables, False)[0]

    def role(self, path: str, rank: int) -> Role:
        """The role of a parameter. rank: the number of its dims within one layer."""
        return self.declared.get(path, "vector" if rank < 2 else "matrix")


def of_flax(make: Callable[[nnx.Rngs], Any], call: Callable[[Any], Any]) -> Model:
    """The model of a function that makes a module of nnx or linen; allocates nothing.

    call: something that reaches all parameters of the module, such as the loss of a batch of zeros. Raises TypeError for anything else.
    """
    made: list[Any] = []

    def probe() -> Any:
        made.append(make(nnx.Rngs(0)))
        return made[0] if isinstance(made[0], nnx.Module) else None

    nnx.eval_shape(probe)
    if isinstance(made[0], nnx.Module):
        return of_nnx(make)
    if isinstance(made[0], linen.Module):
        return of_linen(made[0], call)
    raise TypeError(f"made a value of type {type(made[0]).__name__}, not an nnx.Module or a linen Module")


def of_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """The model of a function that makes an nnx module; allocates nothing."""
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    # As it is made it is to be trained. The structure without dropout, and with a BatchNorm that uses its statistics, is another one.
    evaluated = nnx.merge(graph, params, rest)
    evaluated.eval()
    graphs = {True: graph, False: nnx.graphdef(evaluated)}
    keys = _key_impls(nnx.to_pure_dict(rest))

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, rest = nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)
        return nnx.to_pure_dict(params), _bits(nnx.to_pure_dict(rest))

    def run(use: Use, values: Any, variables: Any, is_training: bool) -> tuple[Any, Any]:
        filled = _filled(params, values), _filled(rest, _keys(variables, keys))
        module = nnx.merge(graphs[is_training], *filled)
        declared = _attributes(module).keys()
        result = use(module)
        # What a module declares may carry values from its layers to its loss.
        if lost := [name for name, x in _attributes(module).items() if name not in declared and isinstance(x, jax.Array)]:
            why = "is not an nnx.Variable, so its value would be lost. Return it, or make it an nnx.Variable in the model's __init__"
            raise LostError(f"the model's attribute {lost[0]} was set to an array, which {why}")
        after = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))
        # A module may add variables while it runs, such as values that it sows. They do not outlive the step.
        return result, _bits(_like(variables, after))

    return Model(
        init=init,
        run=run,
        declared=_declared_by_nnx(module),
        has_features=hasattr(module, "features"),
        takes=places_taken(module),
        has_cache=hasattr(module, "init_cache") and hasattr(module, "decode"),
        is_trained_differently=graphs[True] != graphs[False],
    )


def of_linen(module: linen.Module, call: Callable[[Any], Any]) -> Model:
    """The model of a linen module. call: something that reaches all its parameters, such as the loss of a batch of zeros."""

    def make(key: jax.Array) -> tuple[Any, Any]:
        collections = linen.meta.unbox(linen.init(call, module)({"params": key}))
        return collections.pop("params", {}), collections

    shapes = jax.eval_shape(make, jax.eval_shape(jax.random.key, 0))
    mutable = sorted(shapes[1])

    def apply(use: Use, params: Any, collections: Any, rngs: Any) -> tuple[Any, Any]:
        return linen.apply(use, module, mutable=mutable)({"params": params, **collections}, rngs=rngs)

    draws = _draws(lambda params, collections: apply(call, params, collections, None), *shapes)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params, variables = make(key)
        rngs = {"key": jax.random.key_data(jax.random.fold_in(key, 1)), "count": jnp.zeros((), jnp.uint32)}
        return params, {**variables, **({"rngs": rngs} if draws else {})}

    def run(use: Use, params: Any, variables: Any, is_training: bool) -> tuple[Any, Any]:
        collections, rngs, after = dict(variables), None, {}
        if stored := collections.pop("rngs", None):
            # `params` serves all streams that have no key of their own.
            rngs = {"params": jax.random.fold_in(jax.random.wrap_key_data(stored["key"]), stored["count"])}
            after = {"rngs": {**stored, "count": stored["count"] + is_training}}
        result, changed = apply(use, params, collections, rngs)
        return result, {**collections, **changed, **after}

    declared: dict[str, Role] = {}
    for path, _ in jax.tree.leaves_with_path(shapes[0]):
        # The parameter of nn.Embed has this name.
        if path[-1].key == "embedding":
            declared["/".join(k.key for k in path)] = "table"
    # A module learns by an argument whether it is trained, if at all.
    return Model(
        init=init,
        run=run,
        declared=declared,
        has_features=hasattr(module, "features"),
        takes=places_taken(module),
        has_cache=hasattr(module, "init_cache") and hasattr(module, "decode"),
        is_trained_differently=False,
    )


def places_taken(module: Any) -> frozenset[str]:
    """Which of `PLACES` are arguments of a module's `features`, or of the module itself."""
    called = getattr(module, "features", module)
    return frozenset(PLACES).intersection(inspect.signature(called).parameters if callable(called) else ())


def _draws(apply: Callable[..., Any], params: Any, collections: Any) -> bool:
    """Whether a linen module draws random numbers while it is trained."""
    try:
        jax.eval_shape(apply, params, collections)
    except InvalidRngError:
        return True
    return False


def _attributes(module: nnx.Module) -> dict[str, Any]:
    """The attributes of a module and of those in it, by path."""
    nodes = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]
    return {"/".join(map(str, (*path, name))): value for path, node in nodes for name, value in vars(node).items()}


def _declared_by_nnx(module: nnx.Module) -> dict[str, Role]:
    declared: dict[str, Role] = {}
    for path, node in nnx.iter_graph(module):
        name = "/".join(map(str, path))
        if isinstance(node, Table | Vector):
            declared[name] = "table" if isinstance(node, Table) else "vector"
        elif isinstance(node, nnx.Embed):
            declared[f"{name}/embedding".removeprefix("/")] = "table"
    return declared


def _filled(state: nnx.State, values: Any) -> nnx.State:
    # A copy of the tree, because replace_by_pure_dict writes into it.
    filled = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(filled, values)
    return filled


def _like(wanted: Any, tree: Any) -> Any:
    """The part of nested dicts that other nested dicts have too."""
    return {name: _like(child, tree[name]) for name, child in wanted.items()} if isinstance(wanted, Mapping) else tree


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _bits(tree: Any) -> Any:
    """Random keys as unsigned integers."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _keys(tree: Any, impls: Any) -> Any:
    """The inverse of `_bits`. impls: the kind of key, or an empty text, for each leaf."""
    return jax.tree.map(lambda x, impl: jax.random.wrap_key_data(x, impl=impl) if impl else x, tree, impls)


def _key_impls(shapes: Any) -> Any:
    found: list[str] = []
    # JAX names the kind of a key only for an array or a tracer.
    jax.eval_shape(lambda tree: found.extend(str(jax.random.key_impl(x)) if _is_key(x) else "" for x in jax.tree.leaves(tree)), shapes)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)
