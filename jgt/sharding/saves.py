"""Which named tensors a backward pass finds on the device, on the host, or computes again: `save:` as remat policies.

`jax.checkpoint` asks its policy about every value of a region. A value has no identity there but the name that
`signal.tensor` gave it, so the rules of a region become a table from names to actions. If the model has a
`jax.checkpoint` around the tensor, its own policy is asked about everything that the table does not name. If it has none, jgt
makes a region, and there every other value is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jgt.replacements.replacement import Policy
from jgt.rules import Action, SaveRule


@dataclass(frozen=True)
class SavePolicy:
    """A remat policy by tensor name.

    around: the policy that decides about values without an action; None: they are recomputed. named: a named value without an
    action is kept, as the rules of a region that jgt made speak only of some names. actions: by name, in an order that does not depend on
    the program.
    """

    actions: tuple[tuple[str, Action], ...]
    around: Policy | None = None
    named: bool = False

    @classmethod
    def of(cls, saves: Mapping[str, SaveRule], around: Policy | None = None, *, named: bool = True) -> SavePolicy:
        """The policy of a region for these rules, by default of one that jgt makes."""
        return cls(tuple(sorted((name, rule.action) for name, rule in saves.items())), around, named)

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "name":
            for name, action in self.actions:
                if name == params["name"]:
                    # JAX's own policy answers, because the objects by which it says `save` and `offload` are private.
                    return _policy_of(action, name)(primitive, *avals, **params)
            if self.named:
                return _policy_of("keep", params["name"])(primitive, *avals, **params)
        return self.around(primitive, *avals, **params) if self.around is not None else False


def _policy_of(action: Action, name: str) -> Policy:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name] if action == "keep" else [],
        names_which_can_be_offloaded=[name] if action == "offload" else [],
        offload_src="device",
        offload_dst="pinned_host",
    )
