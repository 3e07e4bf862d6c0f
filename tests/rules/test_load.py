"""Rules from YAML and from Python: what a file means, and every message that it can cause."""

import pytest

import jgt
from jgt.document import InputError, parse
from jgt.rules import BackwardRule, OverlapRule, Rules, SaveRule, SignalRule, SpecRule, load_rules, make_rules

FULL = """\
axes: {batch: [data, fsdp]}
inputs: {tokens: [batch], "*": []}
params: {"embed/table": [tensor, fsdp]}
optimizer: {"**": [[data, fsdp]]}
signals:
  layers/attn:
    params: {"*/kernel": [fsdp, tensor]}
    optimizer: {"*/kernel": [data, tensor]}
    tensors: {heads: [batch, null, tensor]}
    out: [batch, ..., null]
    backward: {out: [batch, tensor, null], tensors: {heads: [null]}}
    save: {heads: offload, "k*": keep}
    overlap: tensor
  layers/mlp:
    out: []
default: replicate
"""


def spec(pattern, *entries):
    return SpecRule(pattern=pattern, spec=tuple((entry,) if isinstance(entry, str) else entry or () for entry in entries))


EXPECTED = Rules(
    inputs=(spec("tokens", ("data", "fsdp")), spec("*", ...)),
    params=(spec("embed/table", "tensor", "fsdp"),),
    optimizer=(spec("**", ("data", "fsdp")),),
    signals=(
        SignalRule(
            pattern="layers/attn",
            params=(spec("*/kernel", "fsdp", "tensor"),),
            optimizer=(spec("*/kernel", "data", "tensor"),),
            tensors=(spec("heads", ("data", "fsdp"), None, "tensor"),),
            out=spec("layers/attn", ("data", "fsdp"), ..., None),
            backward=BackwardRule(out=spec("layers/attn", ("data", "fsdp"), "tensor", None), tensors=(spec("heads", None),)),
            save=(SaveRule(name="heads", action="offload"), SaveRule(name="k*", action="keep")),
            overlap=OverlapRule(axis="tensor"),
        ),
        SignalRule(pattern="layers/mlp", out=spec("layers/mlp", ...)),
    ),
    default="replicate",
)


def problems_of(text):
    with pytest.raises(InputError) as caught:
        make_rules(parse(text, "r.yaml"))
    return list(caught.value.problems)


def test_a_file_becomes_rules(tmp_path):
    (tmp_path / "r.yaml").write_text(FULL)
    assert load_rules(tmp_path / "r.yaml") == EXPECTED


def test_rules_know_their_lines():
    rules = make_rules(parse(FULL, "r.yaml"))
    assert rules.signals[0].out.where == "r.yaml:10"
    assert rules.signals[1].where == "r.yaml:14"


def test_equal_rules_hash_equal_wherever_they_stand():
    tree = {"signals": {"a": {"out": ["x", None, ...], "save": {"h": "keep"}}}, "default": "replicate"}
    built = make_rules(tree)
    read = make_rules(parse("# a line\nsignals:\n  a: {out: [x, null, ...], save: {h: keep}}\ndefault: replicate", "r.yaml"))
    assert built == read
    assert hash(built) == hash(read)
    assert built != make_rules({**tree, "default": None})


def test_python_may_write_tuples_and_ellipsis():
    assert make_rules({"signals": {"a": {"out": (("x", "y"), ...)}}}).signals[0].out == spec("a", ("x", "y"), ...)


def test_no_rules_at_all():
    assert make_rules({}) == Rules()


def test_inputs_follow_the_batch_group():
    rules = make_rules(parse("axes: {batch: [data, fsdp]}", "r.yaml"))
    assert rules.inputs == (spec("**", ("data", "fsdp"), ...),)
    assert rules.inputs[0].where == "r.yaml:1"


def test_inputs_may_be_one_spec():
    assert make_rules({"inputs": ["data"]}).inputs == (spec("**", "data"),)


def test_inputs_may_be_switched_off():
    assert make_rules({"axes": {"batch": ["data"]}, "inputs": {}}).inputs == ()


def test_a_group_of_one_or_none():
    rules = make_rules({"axes": {"one": "data", "none": []}, "params": {"a": ["one", "none"], "b": [["x", "one", "none"], ["none"]]}})
    assert rules.params == (spec("a", "data", None), spec("b", ("x", "data"), None))


def test_a_file_extends_another_entry_by_entry(tmp_path):
    (tmp_path / "base.yaml").write_text(FULL)
    (tmp_path / "r.yaml").write_text(
        'extends: base.yaml\nsignals:\n  layers/attn: {params: {"q/kernel": []}, save: null}\n  layers/mlp: null\nparams: {x: []}\n'
    )
    rules = load_rules(tmp_path / "r.yaml")
    (attn,) = rules.signals
    assert [r.pattern for r in attn.params] == ["q/kernel", "*/kernel"]
    assert attn.save == ()
    assert attn.out == EXPECTED.signals[0].out
    assert [r.pattern for r in rules.params] == ["x", "embed/table"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("signal: {}", "r.yaml:1: signal: unknown key. Did you mean 'signals'?"),
        ("signals:\n  a: {outs: []}", "r.yaml:2: signals.a.outs: unknown key. Did you mean 'out'?"),
        ("signals:\n  a: {backward: {save: []}}", "r.yaml:2: signals.a.backward.save: unknown key. Known: out, tensors"),
        ("signals: [a]", "r.yaml:1: signals: must be a mapping of keys to values, not a list"),
        ("[a]", "r.yaml:1: file: must be a mapping of keys to values, not a list"),
        ("signals: {a: 1}", "r.yaml:1: signals.a: must be a mapping of keys to values, not the whole number 1"),
        ("params: {a: x}", "r.yaml:1: params.a: a spec is a list with an axis, a list of axes, null or `...` for each dim"),
        ("params: {a: null}", "r.yaml:1: params.a: a spec is a list"),
        ("signals: {a: {out: null}}", "r.yaml:1: signals.a.out: a spec is a list"),
        ("signals: {a: {backward: {out: null}}}", "r.yaml:1: signals.a.backward.out: a spec is a list"),
        ("params: {a: [1]}", "r.yaml:1: params.a[0]: a spec entry is an axis, a list of axes, null or `...`, not the whole number 1"),
        (
            "params: {a: [[x, 1]]}",
            "r.yaml:1: params.a[0][1]: must be the name of a mesh axis or of a group in axes:, not the whole number 1",
        ),
        ("reads: 1", "r.yaml:1: reads: must be the name of a mesh axis or of a group in axes:, not the whole number 1"),
        ("otherwise: {params: [x], optimizer: [y]}", "r.yaml:1: otherwise.params: one of params and optimizer has the axes"),
        ("otherwise: {signals: [x]}", "r.yaml:1: otherwise.signals: unknown key."),
        ("params: {a: [[...]]}", "r.yaml:1: params.a[0][0]: must be the name of a mesh axis"),
        ("params: {a: [..., ...]}", "r.yaml:1: params.a: `...` may appear only once in a spec"),
        ("params: {a: [x, x]}", "r.yaml:1: params.a: the axis 'x' appears twice in one spec"),
        ("axes: {g: [x, y]}\nparams: {a: [g, x]}", "r.yaml:2: params.a: the axis 'x' appears twice in one spec"),
        ("params: {a: [[x, x]]}", "r.yaml:1: params.a: the axis 'x' appears twice in one spec"),
        ("axes: {g: [1]}", "r.yaml:1: axes.g: an axes group is a list of mesh axes"),
        ("axes: {g: {a: b}}", "r.yaml:1: axes.g: an axes group is a list of mesh axes"),
        (
            "signals: {a: {save: {h: kep}}}",
            "r.yaml:1: signals.a.save.h: 'kep' is not one of keep, recompute, offload. Did you mean 'keep'?",
        ),
        ("signals: {a: {save: {h: [keep]}}}", "r.yaml:1: signals.a.save.h: ['keep'] is not one of keep, recompute, offload"),
        ("signals: {a: {overlap: [x]}}", "r.yaml:1: signals.a.overlap: must be the name of a mesh axis or of a group in axes:, not a list"),
        (
            "axes: {g: [x, y]}\nsignals: {a: {overlap: g}}",
            "r.yaml:2: signals.a.overlap: takes one mesh axis, but 'g' stands for x, y. Write one",
        ),
        ("default: shard", "r.yaml:1: default: 'shard' is not one of replicate. Leave it out"),
        ("default: [a]", "r.yaml:1: default: ['a'] is not one of replicate"),
        ("inputs: x", "r.yaml:1: inputs: must be a mapping of keys to values, not the text 'x'"),
    ],
)
def test_a_mistake_is_named(text, problem):
    (found,) = problems_of(text)
    assert found.startswith(problem)


def test_all_mistakes_come_at_once():
    found = problems_of("signal: {}\nparams:\n  a: [1]\n  b: x\ndefault: 3")
    assert [p.split(":")[1] for p in found] == ["1", "3", "4", "5"]


def test_make_rules_names_the_key():
    with pytest.raises(InputError, match=r"^rules: signals\.a\.out: a spec is a list"):
        make_rules({"signals": {"a": {"out": "x"}}})


def test_an_axis_that_the_mesh_lacks_is_named():
    rules = make_rules(parse("params:\n  a: [tensr]\n  b: [[data, tensr]]", "r.yaml"))
    assert list(rules.axis_problems(["data", "tensor"])) == [
        "r.yaml:2: a: the mesh has no axis 'tensr', which 1 more rule names, too. Did you mean 'tensor'? "
        "To turn the axis off, give it the size 1 in mesh: {tensr: 1}"
    ]


def test_the_names_of_the_package():
    assert jgt.load_rules is load_rules
    assert jgt.make_rules is make_rules
    assert jgt.Rules is Rules
