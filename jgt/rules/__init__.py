"""Rules: signal pattern → what happens. Pure Python: no JAX, no mesh."""

from jgt.rules.load import load_rules, make_rules, rules_from_node
from jgt.rules.match import matches, matches_end, prefixes
from jgt.rules.reach import Matcher
from jgt.rules.rules import Action, Rules, SaveRule, SignalRule
from jgt.rules.spec import Misfit, Spec, SpecRule, expand, fits_rank, misfits, show, show_dims

__all__ = [
    "Action",
    "Matcher",
    "Misfit",
    "Rules",
    "SaveRule",
    "SignalRule",
    "Spec",
    "SpecRule",
    "expand",
    "fits_rank",
    "load_rules",
    "make_rules",
    "matches",
    "matches_end",
    "misfits",
    "prefixes",
    "rules_from_node",
    "show",
    "show_dims",
]
