"""Rules say what happens at which signal. They are plain data: this room imports neither JAX nor a mesh.

A rules file maps signals to specs. For example

    axes:    {batch: [data, fsdp]}
    signals:
      mlp:
        params: {up/kernel: [null, tensor]}     # parameters used under the signal mlp
        out:    [batch, null]                   # floating values that leave it

reads as `Rules(signals=(SignalRule(pattern="mlp", params=(SpecRule(pattern="up/kernel", spec=(None, "tensor")),), ...),), ...)`.
`load` reads it and reports every mistake with its line, `matching` answers which rule decides, and `coverage` reports rules that
decide nothing. `jgt.sharding` asks these questions while it rewrites a program.
"""

from jgt.rules.coverage import AnyMatch, Seen, unreached
from jgt.rules.load import SHIPPED_RULES, load_rules, make_rules, rules_from_node
from jgt.rules.matching import (
    Match,
    match_experts,
    match_input,
    match_optimizer,
    match_out,
    match_overlap,
    match_param,
    match_save,
    match_tensor,
)
from jgt.rules.rules import Action, ExpertsRule, OverlapRule, Rules, SaveRule, SignalRule, matches, matches_end, prefixes
from jgt.rules.spec import Misfit, Spec, SpecRule, expand, fits_rank, misfit_problems, misfits, show

__all__ = [
    "SHIPPED_RULES",
    "Action",
    "AnyMatch",
    "ExpertsRule",
    "Match",
    "Misfit",
    "OverlapRule",
    "Rules",
    "SaveRule",
    "Seen",
    "SignalRule",
    "Spec",
    "SpecRule",
    "expand",
    "fits_rank",
    "load_rules",
    "make_rules",
    "match_experts",
    "match_input",
    "match_optimizer",
    "match_out",
    "match_overlap",
    "match_param",
    "match_save",
    "match_tensor",
    "matches",
    "matches_end",
    "misfit_problems",
    "misfits",
    "prefixes",
    "rules_from_node",
    "show",
    "unreached",
]
