"""The `model.experts:` section: how many experts the MLP of a layer consists of, and how a token gets its own. Imports no JAX.

The words here say nothing of devices. Which mesh axis holds the experts, and how tokens travel to them, are words of the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jgt.document import Bound

from ...settings.numbers import NotNegative, Positive

Experts = Annotated[int, Bound(low=1, high=100_000)]


@dataclass(frozen=True, kw_only=True)
class GroupsConfig:
    """`model.experts.groups`: a token first chooses groups of experts, then experts in those groups.

    count: the number of groups, each of equally many neighbouring experts.
    choose: the number of groups that a token chooses.
    best: a group is worth the scores of so many of its best experts; null: of as many as a chosen group has to give on average.
    """

    count: Experts = 8
    choose: Experts = 4
    best: Experts | None = None

    def of_best(self, choose: int) -> int:
        """The number of experts whose scores are a group's worth, where a token chooses so many."""
        return self.best or max(choose // self.choose, 1)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """`model.experts`: a mixture of experts in the place of the MLP.

    count: the number of experts of a layer.
    choose: the number of experts that a token goes through.
    shared: the width of an MLP that all tokens go through as well, in widths of an expert; 0: none.
    ffn: the width of an expert; null: the width of the MLP.
    shared_gate: whether that MLP's result is multiplied by a gate, the sigmoid of a projection of each token.
    score: what makes scores of the router's logits.
    normalized: whether the scores of a token's chosen experts are divided by their sum; null: if there are several.
    result_scale: a factor of the results of the chosen experts.
    groups: limits a token to some groups of experts; null: no limit.
    balance: what keeps the load of experts equal. bias: a bias of the choice, adjusted after each step; sequence, batch: a loss.
    balance_rate: the step of the bias, or the factor of the loss; null: 0.001 for bias, 0.01 for a loss.
    z_loss: the factor of the router's z-loss.
    first_dense: the number of first layers that have an ordinary MLP.
    """

    count: Experts = 8
    choose: Experts = 2
    shared: Annotated[int, Bound(low=0, high=10_000)] = 0
    ffn: Annotated[int, Bound(low=1, high=10_000_000)] | None = None
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool | None = None
    result_scale: Positive = 1.0
    groups: GroupsConfig | None = None
    balance: Literal["bias", "sequence", "batch", "none"] = "bias"
    balance_rate: NotNegative | None = None
    z_loss: NotNegative = 0.0
    first_dense: Annotated[int, Bound(low=0, high=10_000)] = 0

    @property
    def is_normalized(self) -> bool:
        """Whether the scores of a token's chosen experts are divided by their sum."""
        return self.choose > 1 if self.normalized is None else self.normalized

    @property
    def rate(self) -> float:
        """The step of the bias, or the factor of the loss."""
        return _RATES[self.balance] if self.balance_rate is None else self.balance_rate

    @property
    def has_balance_loss(self) -> bool:
        """Whether a loss balances the load."""
        return self.balance in ("sequence", "batch")

    @property
    def has_losses(self) -> bool:
        """Whether the training loss has terms of the router."""
        return self.has_balance_loss or self.z_loss > 0

    def problems(self) -> Iterator[tuple[str, str]]:
        """More experts chosen than there are, and groups that do not fit."""
        if self.choose > self.count:
            yield "choose", f"{self.choose} of count {self.count} experts cannot be chosen. Use {self.count} at most"
        if self.shared_gate and not self.shared:
            yield "shared_gate", "it multiplies the result of a shared MLP, and there is none. Set shared, or leave shared_gate out"
        if self.groups is not None:
            yield from self._group_problems(self.groups)

    def _group_problems(self, groups: GroupsConfig) -> Iterator[tuple[str, str]]:
        if self.count % groups.count:
            fits = ", ".join(str(n) for n in range(1, min(self.count, 1000) + 1) if self.count % n == 0)
            yield "groups", f"count {self.count} is not divisible by {groups.count} groups. These divide it: {fits}"
        elif groups.choose > groups.count:
            yield "groups", f"{groups.choose} of {groups.count} groups cannot be chosen. Use {groups.count} at most"
        elif (available := groups.choose * (self.count // groups.count)) < self.choose <= self.count:
            least = -(-self.choose * groups.count // self.count)
            yield "groups", f"{groups.choose} groups have {available} experts, but choose is {self.choose}. Choose {least} groups or more"


_RATES = {"bias": 1e-3, "sequence": 1e-2, "batch": 1e-2, "none": 0.0}
"""`balance_rate` by default: of DeepSeek-V3's bias, and of Switch's loss (arXiv 2412.19437, 2101.03961)."""
