"""Rules say what happens at which signal. They are plain data: this room imports neither JAX nor a mesh.

A rules file maps signals to specs. For example

    axes:    {batch: [data, fsdp]}
    signals:
      mlp:
        params: {up/kernel: [null, tensor]}     # parameters used under the signal mlp
        out:    [batch, null]                   # floating values that leave it

reads as `Rules(signals=(SignalRule(pattern="mlp", params=(SpecRule(pattern="up/kernel", spec=((), ("tensor",))),), ...),), ...)`.
`load` reads it and reports every mistake with its line, `matching` answers which rule decides, and `coverage` reports rules that
decide nothing. `jgt.sharding` asks these questions while it rewrites a program.
"""

from jgt.rules.coverage import AnyMatch, Seen, unreached
from jgt.rules.load import load_rules, make_rules
from jgt.rules.matching import (
    match_context,
    match_experts,
    match_optimizer,
    match_out,
    match_overlap,
    match_param,
    match_save,
    match_tensor,
)
from jgt.rules.pattern import matches, prefixes
from jgt.rules.rules import Match, Own, Rules, SplitRule
from jgt.rules.signals import Action, BackwardRule, ContextRule, ExpertsRule, OverlapRule, SaveRule, SignalRule
from jgt.rules.spec import SpecRule, misfits

__all__ = [
    "Action",
    "AnyMatch",
    "BackwardRule",
    "ContextRule",
    "ExpertsRule",
    "Match",
    "OverlapRule",
    "Own",
    "Rules",
    "SaveRule",
    "Seen",
    "SignalRule",
    "SpecRule",
    "SplitRule",
    "load_rules",
    "make_rules",
    "match_context",
    "match_experts",
    "match_optimizer",
    "match_out",
    "match_overlap",
    "match_param",
    "match_save",
    "match_tensor",
    "matches",
    "misfits",
    "prefixes",
    "unreached",
]
