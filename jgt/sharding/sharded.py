"""A function with rules: `jgt.shard` makes it, and everything else is asked of it.

    loss = jgt.shard(loss_fn, rules, mesh)
    loss(params, batch)                  # the same signature, values and gradients, laid out over the mesh
    loss.placement(params, batch)        # where parameters, gradients, optimizer state and inputs go
    loss.init(init_fn, key, batch=batch) # parameters made where they belong

All three need the traced program of the function, so the wrapper keeps one for each set of argument shapes. A trainer
that asks for the placement, compiles its step and makes a plan of it calls the user's function once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.document import InputError
from jgt.program import scopes
from jgt.program.places import off_explicit_axes
from jgt.replacements.replacement import Replacement
from jgt.rules import Rules
from jgt.sharding.argument_specs import check_aliases
from jgt.sharding.arguments import Arguments, split_result
from jgt.sharding.call import PlannedCall, plan_call
from jgt.sharding.checks import (
    RulesLike,
    check_function,
    check_mesh,
    check_optimizer,
    check_pipeline,
    check_surroundings,
    own_mesh,
    rules_on,
)
from jgt.sharding.inputs import Signature, StateArguments
from jgt.sharding.own.trace import erased, explicit_mesh_of, run_on_auto_axes
from jgt.sharding.partitioner import avoid_faults
from jgt.sharding.placement import Placement
from jgt.sharding.staged import Run, Staging
from jgt.sharding.storage import Storage

if TYPE_CHECKING:
    from jgt.sharding.inserted import Insertions

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Sharded(Generic[_P, _R]):
    """A function rewritten by rules. It can be differentiated, vmapped and jitted like the function itself.

    Like jax.jit, it calls the function once for each set of argument shapes and constants and may reuse that trace later, so values that
    the function reads from elsewhere should not change.
    """

    def __init__(
        self,
        fn: Callable[_P, _R],
        rules: RulesLike,
        mesh: Mesh | AbstractMesh,
        replacements_of: Callable[[Rules], Sequence[Replacement]],
        *,
        partial: bool = False,
        pipeline: Staging | None = None,
        state: StateArguments = None,
        pad: bool = False,
    ):
        check_function(fn)
        own = own_mesh(mesh)
        rules, mesh, pipeline = rules_on(rules, mesh), check_mesh(mesh), check_pipeline(pipeline)
        # `updated=()`: fn may be an object with state, whose attributes do not belong in this object's __dict__.
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._rules, self._mesh, self._own = fn, rules, mesh, own
        self._replacements_of, self._partial, self._pipeline, self._pad = replacements_of, partial, pipeline, pad
        self._signature = Signature.of(fn, state)
        self._planned: dict[Hashable, PlannedCall] = {}

    def __repr__(self) -> str:
        """The function, the rules and their number, the mesh, and what becomes of layouts of the function's own."""
        rules, mesh, stages = self._rules, self._mesh, self._pipeline
        name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
        numbers = {"signal": len(rules.signals), "spec": sum(1 for _ in rules.spec_rules())}
        counts = ", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in numbers.items())
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        lines = [f"{name}, sharded", f"rules: {rules.where}, {counts}", f"mesh: {axes} = {mesh.size} devices"]
        lines += [] if stages is None else [f"pipeline: {stages.signal} over {stages.axis}"]
        return "\n  ".join([*lines, f"layouts of its own: {'dropped' if rules.own == 'drop' else 'kept'}"])

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """The function's result. Raises InputError if rules, mesh and shapes do not fit, with every problem."""
        arguments = self._arguments(args, kwargs)
        planned = self._plan(arguments)
        return self._result(arguments, planned, planned.run, arguments.arrays)

    def placement(self, *args: _P.args, **kwargs: _P.kwargs) -> Placement:
        """Where parameters, gradients, optimizer state and inputs go, from arrays or ShapeDtypeStructs.

        Nothing is computed and no device is touched. Raises InputError as a call does.
        """
        return self._plan(self._arguments(args, kwargs)).placement

    def planned(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Arguments, PlannedCall]:
        """The arrays of a call and what it runs, for comparisons of both programs. Raises InputError as a call does."""
        arguments = self._arguments(args, kwargs)
        return arguments, self._plan(arguments)

    def inserted(self, *args: _P.args, **kwargs: _P.kwargs) -> Insertions:
        """The constraints that jgt puts into the program of a call, each with the lines of its rule and its operation.

        `print` shows a table. Raises InputError as a call does.
        """
        return importlib.import_module("jgt.sharding.inserted").insertions_of(*self.planned(*args, **kwargs))

    def storage(self, *args: _P.args, **kwargs: _P.kwargs) -> Storage | None:
        """The form in which parameters are best stored between steps; None: as the model has them."""
        return self._plan(self._arguments(args, kwargs)).storage

    def storage_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] = {}, *, keeps_shapes: bool = False, problems: Sequence[str] = ()
    ) -> Storage:
        """The placement of the parameters of a call (`Storage.model`), and the form in which they are best stored between steps.

        keeps_shapes: whether they have to be stored in the model's shapes. Raises InputError as a call does, with `problems`, which were
        found before.
        """
        try:
            planned = self._plan(self._arguments(args, kwargs))
        except InputError as error:
            raise InputError([*problems, *error.problems]) from None
        if problems:
            raise InputError(problems)
        storage = planned.storage
        if storage is not None and keeps_shapes:
            storage = storage.of_same_shapes()
        return storage or Storage(model=planned.placement)

    def on_stored(self, storage: Storage) -> Callable[..., _R]:
        """The same function of parameters that are stored so. It has no state in its first argument."""
        function = self.on_used(storage)

        def call(params: Any, *args: Any, **kwargs: Any) -> _R:
            return function(storage.used(params), *args, **kwargs)

        return call

    def on_used(self, storage: Storage) -> Callable[..., _R]:
        """The same function of what `storage.used` makes of stored parameters, for several calls with the same parameters."""

        def call(params: Any, *args: Any, **kwargs: Any) -> _R:
            leaves = jax.tree.leaves(params)
            arguments = self._arguments((storage.model_shapes(params), *args), kwargs)
            planned = self._plan(arguments)
            arrays = [*leaves, *arguments.arrays[len(leaves) :]]
            run = planned.run_stored if storage.has_stacks else planned.run
            assert run is not None, "a function with stacks in storage is a pipeline"
            return self._result(arguments, planned, run, arrays)

        return call

    def _result(self, arguments: Arguments, planned: PlannedCall, run: Run, arrays: Sequence[Any]) -> _R:
        """The result as the function returns it. New values of state are stored in the caller's variables."""
        explicit = check_surroundings(arrays, self._mesh)
        results = run(arrays) if explicit is None else run_on_auto_axes(run, arrays, explicit, planned.result_specs)
        num_results = planned.out_tree.num_leaves
        arguments.store(planned.changed, results[num_results:])
        return jax.tree.unflatten(planned.out_tree, results[:num_results])

    def init(self, init_fn: Callable[..., Any], *args: Any, batch: Any, optimizer: Any = None) -> Any:
        """Parameters from `init_fn(*args)`, made where they belong: no device ever holds more than its part.

        `batch` contains the function's other arguments, as arrays or ShapeDtypeStructs, in a tuple if there are several. With an optax
        `optimizer` the result is (parameters, optimizer state). Other leaves than arrays and numbers, such as functions of Equinox modules,
        stay as they are. The random bits are the same on every mesh. Raises InputError.
        """
        check_optimizer(optimizer)
        batches = cast("tuple[Any, ...]", batch) if isinstance(batch, tuple) else (batch,)
        # Shapes suffice: the loss is only traced, and no parameter exists before its place is known.
        arrays_of, whole = split_result(init_fn)
        arrays_of = erased(arrays_of, self._own)
        arguments = self._arguments((whole(jax.eval_shape(arrays_of, *args)), *batches), {})
        try:
            placement = self._plan(arguments).placement
        except TypeError as error:
            error.add_note("jgt traced the function with what init_fn returns as its first argument, and `batch` as its other ones")
            raise

        def arrays_and_state(*args: Any) -> tuple[list[Any], Any]:
            with scopes.rule():
                arrays = arrays_of(*args)
                return arrays, None if optimizer is None else optimizer.init(whole(arrays))

        state_places = placement.optimizer(jax.eval_shape(arrays_and_state, *args)[1])
        places = jax.tree.leaves(placement.params), state_places
        # Places are on Auto axes, also where the program's own mesh is set.
        with off_explicit_axes():
            arrays, state = cast("Callable[..., Any]", jax.jit(arrays_and_state, out_shardings=places))(*args)
        return whole(arrays) if optimizer is None else (whole(arrays), state)

    def under(
        self, rules: RulesLike, mesh: Mesh | AbstractMesh, partial: bool, pipeline: Staging | None, state: StateArguments
    ) -> Sharded[_P, _R]:
        """The same function under these rules; this very object, with its traces, if they are its own. state: None for its own."""
        rules = rules_on(rules, mesh)
        signature = self._signature if state is None else Signature.of(self._fn, state)
        # By value: rules that were loaded twice are still its own.
        if (self._rules, self._mesh, self._partial, self._pipeline, self._signature) == (rules, mesh, partial, pipeline, signature):
            return self
        state = signature.state
        return Sharded(self._fn, rules, mesh, self._replacements_of, partial=partial, pipeline=pipeline, state=state, pad=self._pad)

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        own = self._own or own_mesh(None) or next(filter(None, map(explicit_mesh_of, jax.tree.leaves((args, kwargs)))), None)
        return Arguments(self._fn, args, kwargs, self._signature, own, self._mesh.abstract_mesh)

    def _plan(self, arguments: Arguments) -> PlannedCall:
        key = arguments.key()
        planned = None if key is None else self._planned.get(key)
        if planned is not None:
            # The key does not say whether two parameters are one array.
            check_aliases(arguments.parameters, planned.placement.parameters, self._rules)
            return planned
        # Here and not before: a function that is never called leaves JAX's compiler as it is.
        avoid_faults(scopes.OWN)
        # A constraint of a rule is a request only where axes are Auto.
        with off_explicit_axes():
            planned = plan_call(
                arguments, self._rules, self._mesh, self._replacements_of, partial=self._partial, pipeline=self._pipeline, pad=self._pad
            )
        if key is not None and planned.is_reusable:
            self._planned[key] = planned
        return planned
