"""The first rule that matches decides; a rule that never decides anything is reported."""

import pytest

from jgt.document import parse
from jgt.rules import Seen, make_rules, match_optimizer, match_out, match_param, match_save, match_tensor, unreached


class Asked:
    """Queries rules about the parts of a program, and records the matches and the names that the program would contain."""

    def __init__(self, text):
        self.rules = make_rules(parse(text, "r.yaml"))
        self.matches, self.signals, self.tensors, self.out_ranks = [], set(), {}, {}

    def noted(self, match):
        self.matches.append(match)
        return match.rule

    @property
    def problems(self):
        return [problem for match in self.matches for problem in match.problems]

    def see(self, signal):
        self.signals.add(signal)

    def param(self, path, signals, rank):
        return self.noted(match_param(self.rules, path, signals, rank))

    def optimizer(self, path, signals, fits):
        return self.noted(match_optimizer(self.rules, path, signals, fits))

    def input(self, path, rank):
        return self.noted(self.rules.match_input(path, rank))

    def tensor(self, name, signal, rank, *, backward=False):
        self.tensors.setdefault(name, set()).add(signal)
        return self.noted(match_tensor(self.rules, name, signal, rank, backward=backward))

    def out(self, signal, rank, *, backward=False):
        self.out_ranks.setdefault(signal, set()).add(rank)
        return self.noted(match_out(self.rules, signal, rank, backward=backward))

    def save(self, name, signal):
        return self.noted(match_save(self.rules, name, signal))

    def unreached(self):
        seen = Seen(signals=frozenset(self.signals), tensors=self.tensors, out_ranks=self.out_ranks, matches=tuple(self.matches))
        return unreached(self.rules, seen)


def anything(rule):
    return True


def where(rule):
    return None if rule is None else rule.where


def test_the_first_rule_wins():
    asked = Asked("params:\n  w1: [a]\n  w*: [b]")
    assert where(asked.param("x/w1", ["s"], 1)) == "r.yaml:2"
    assert where(asked.param("x/w2", ["s"], 1)) == "r.yaml:3"
    assert list(asked.unreached()) == []


def test_a_rule_of_the_whole_file_goes_before_a_signal():
    asked = Asked("signals:\n  s:\n    params:\n      w: [a]\nparams:\n  w: [b]")
    assert where(asked.param("w", ["s"], 1)) == "r.yaml:6"


def test_a_signal_speaks_of_parameters_below_it():
    asked = Asked("signals:\n  layers/attn:\n    params: {w: [a]}\n  layers:\n    params: {w: [b]}")
    assert where(asked.param("w", ["layers/attn/q"], 1)) == "r.yaml:3"
    assert where(asked.param("w", ["layers/mlp"], 1)) == "r.yaml:5"
    assert asked.param("w", ["head"], 1) is None


def test_a_parameter_under_no_signal_meets_only_the_whole_file_and_the_top():
    asked = Asked('signals:\n  a: {params: {"**": [x]}}\n  "**": {params: {w: [y]}}')
    assert where(asked.param("w", [], 1)) == "r.yaml:3"


def test_a_signal_speaks_of_what_leaves_exactly_it():
    asked = Asked("signals:\n  layers:\n    out: [a, null]\n  layers/attn:\n    out: [b, null]")
    assert where(asked.out("layers/attn", 2)) == "r.yaml:5"
    assert where(asked.out("layers", 2)) == "r.yaml:3"
    assert asked.out("layers/attn", 3) is None
    assert asked.out("layers/attn", 2, backward=True) is None


def test_backward_has_rules_of_its_own():
    asked = Asked("signals:\n  s:\n    backward:\n      out: [a]\n      tensors: {h: [b]}")
    assert where(asked.out("s", 1, backward=True)) == "r.yaml:4"
    assert where(asked.tensor("h", "s", 1, backward=True)) == "r.yaml:5"
    assert asked.out("s", 1) is None
    assert asked.tensor("h", "s", 1) is None


def test_save_is_found_below_the_signal():
    asked = Asked("signals:\n  s:\n    save: {'h*': keep, hx: offload}")
    assert asked.save("hx", "s/t").action == "keep"
    assert asked.save("hx", "other") is None


def test_inputs_match_by_the_end_of_their_path():
    asked = Asked("inputs: {tokens: [a], '*': [b, null]}")
    assert asked.input("0/tokens", 2).pattern == "tokens"
    assert asked.input("1/mask", 2).pattern == "*"
    assert asked.input("1/count", 0) is None


def test_a_shadowed_rule_is_reported_with_the_one_that_takes_all():
    asked = Asked("params:\n  w*: [a]\n  w1: [b]")
    asked.param("w1", ["s"], 1)
    assert list(asked.unreached()) == [
        "r.yaml:3: params: w1: shadowed: all that it matches is taken by the rule at r.yaml:2. Remove one of them or put this one first"
    ]


def test_a_rule_that_decides_somewhere_is_not_shadowed():
    asked = Asked("params:\n  a/*: [x]\n  w: [y]")
    asked.param("a/w", ["s"], 1)
    asked.param("b/w", ["s"], 1)
    assert list(asked.unreached()) == []


def test_a_function_without_a_batch_needs_none_for_the_group_batch():
    assert list(Asked("axes: {batch: [a]}").unreached()) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("params: {x: []}", "r.yaml:1: params: x: no parameter matches. Remove the rule or correct its name"),
        ("optimizer: {x: []}", "r.yaml:1: optimizer: x: no parameter matches"),
        ("inputs: {x: []}", "r.yaml:1: inputs: x: no argument of that name and rank"),
        ("signals: {atn: {out: [a]}}", "r.yaml:1: atn: no signal of the program matches. Did you mean 'attn'?"),
        ("signals: {attn: {params: {x: []}}}", "r.yaml:1: attn: params: x: no parameter used below this signal matches"),
        ("signals: {attn: {optimizer: {x: []}}}", "r.yaml:1: attn: optimizer: x: no parameter used below this signal matches"),
        ("signals: {attn: {tensors: {x: []}}}", "r.yaml:1: attn: tensors: x: no tensor of that name below this signal. Known: heads"),
        ("signals: {attn: {backward: {tensors: {x: []}}}}", "r.yaml:1: attn: backward: x: no tensor of that name below this signal"),
        ("signals: {attn: {save: {x: keep}}}", "r.yaml:1: attn: save: x: no tensor of that name below this signal"),
        (
            "signals: {attn: {out: [a]}}",
            "r.yaml:1: attn: out: the floating values that leave this signal have rank 2, 3, none has the 1 dims of this spec",
        ),
        (
            "signals: {attn: {backward: {out: [a]}}}",
            "r.yaml:1: attn: backward out: the floating values that leave this signal have rank 2, 3, none has the 1 dims",
        ),
        ("signals: {mlp: {out: [a]}}", "r.yaml:1: mlp: out: no floating value leaves this signal"),
    ],
)
def test_a_rule_that_matches_nothing_is_reported(text, problem):
    asked = Asked(text)
    asked.see("attn")
    asked.see("mlp")
    asked.param("w", ["attn"], 2)
    asked.optimizer("w", ["attn"], anything)
    asked.tensor("heads", "attn", 3)
    asked.save("heads", "attn")
    asked.input("tokens", 1)
    for rank in (2, 3):
        asked.out("attn", rank)
        asked.out("attn", rank, backward=True)
    (found,) = asked.unreached()
    assert found.startswith(problem)


def test_each_part_of_a_signal_is_reported_by_itself():
    asked = Asked("signals:\n  s:\n    out: [a]\n    backward: {out: [a, b, null]}")
    asked.see("s")
    asked.out("s", 1)
    asked.out("s", 1, backward=True)
    (found,) = asked.unreached()
    assert found.startswith("r.yaml:4: s: backward out: the floating values that leave this signal have rank 1, none has the 3 dims")


def test_a_tied_parameter_needs_a_rule_of_its_own():
    asked = Asked("signals:\n  embed:\n    params: {table: [a, null]}\n  head:\n    params: {table: [null, a]}")
    assert asked.param("top/table", ["embed", "head"], 2) is None
    (problem,) = asked.problems
    assert problem == (
        "r.yaml:3: params: the parameter top/table is used under several signals whose rules differ: embed (r.yaml:3), head (r.yaml:5). "
        "A tied parameter needs a rule of its own: write 'table' under params: at the top of the file"
    )


def test_a_tied_parameter_with_a_rule_on_one_side_is_reported_too():
    asked = Asked("signals:\n  embed:\n    params: {table: [a, null]}")
    assert asked.param("table", ["embed", "head"], 2) is None
    assert "embed (r.yaml:3), head (no rule)" in asked.problems[0]


def test_a_tied_parameter_may_be_told_the_same_twice():
    asked = Asked("signals:\n  embed:\n    params: {table: [a, null]}\n  head:\n    params: {table: [a, null]}")
    assert asked.param("table", ["embed", "head"], 2).spec[0] == ("a",)
    assert asked.problems == []


COUNTED = " (dims that a scan or an index takes away are not counted)."
LONGER = "Shorten the spec"
SHORTER = "Write null for a dim that is not sharded, or ... for all others"


@pytest.mark.parametrize(("rank", "remedy"), [(1, LONGER), (0, LONGER), (3, SHORTER)])
def test_the_spec_of_a_parameter_has_exactly_its_dims(rank, remedy):
    asked = Asked("params: {w: [a, b]}")
    assert asked.param("w", [], rank) is None
    assert asked.problems == [f"r.yaml:1: w: the spec has 2 dims, but the parameter w has {rank}{COUNTED} {remedy}"]


@pytest.mark.parametrize(("rank", "remedy"), [(1, LONGER), (3, SHORTER)])
def test_the_spec_of_a_tensor_has_exactly_its_dims(rank, remedy):
    asked = Asked("signals: {s: {tensors: {h: [a, b]}}}")
    assert asked.tensor("h", "s", rank) is None
    assert asked.problems == [f"r.yaml:1: h: the spec has 2 dims, but the tensor 'h' at the signal 's' has {rank}{COUNTED} {remedy}"]


@pytest.mark.parametrize(("spec", "ranks"), [("[]", (0, 1, 3)), ("[a, ...]", (1, 2, 3)), ("[..., a]", (1, 2))])
def test_dots_and_an_empty_spec_fit_many_ranks(spec, ranks):
    asked = Asked(f"params: {{w: {spec}}}\nsignals: {{s: {{tensors: {{h: {spec}}}}}}}")
    for rank in ranks:
        assert where(asked.param("w", [], rank)) == "r.yaml:1"
        assert where(asked.tensor("h", "s", rank)) == "r.yaml:2"
    assert asked.problems == []


def test_a_spec_of_the_optimizer_that_does_not_fit_is_skipped():
    asked = Asked("optimizer:\n  w: [a, b]\n  '*': [c]")
    assert where(asked.optimizer("w", [], lambda rule: len(rule.spec) == 1)) == "r.yaml:3"
    assert asked.optimizer("x", [], lambda rule: False) is None
    assert asked.problems == []
    assert list(asked.unreached()) == [
        "r.yaml:2: optimizer: w: no parameter matches that the spec fits. Remove the rule or correct its name"
    ]
