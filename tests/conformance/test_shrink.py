"""The shrinker: what it leaves of a program in which a fault was planted."""

from drawn import drawn

from jgt.conformance.judge import shaped
from jgt.conformance.shrink import shrunk

CHAIN = ["jnp.tanh(x0)", "v0 + x1", "v1.at[0].set(0)", "jnp.cumsum(v2, 1)", "v3 * v0"]
LAID_OUT = {
    "x0": (("a",), ("b",)),
    "x1": ((), ("a",)),
    "v1": (("b",), ("a",)),
    "v2": (("b", "a"), ()),
    "v4": ((), ("b",)),
}
PROGRAM = {"inputs": {"x0": (8, 16), "x1": (8, 16)}, "mesh": (2, 4), "specs": LAID_OUT, "gradient": True, "outputs": ("v1", "v4")}


def judge(is_wrong):
    """A judge of a planted fault that counts what it is asked."""

    def still_wrong(program):
        still_wrong.asked += 1
        try:
            program = shaped(program)
        except Exception:
            return None
        return program if is_wrong(program) else None

    still_wrong.asked = 0
    return still_wrong


def test_a_fault_of_one_operation_is_one_operation_on_two_devices():
    fault = judge(lambda program: any("at set" in step.form and any(program.specs.get(step.name, ())) for step in program.steps))
    small = shrunk(drawn(*CHAIN, **PROGRAM), fault)
    assert [step.code for step in small.steps] == ["x0.at[0].set(0)"]
    assert (small.mesh, small.gradient, small.outputs, [value.name for value in small.inputs]) == ((2,), False, ("v0",), ["x0"])
    assert list(small.specs) == ["v0"] and sum(len(axes) for axes in small.specs["v0"]) == 1
    assert max(small.inputs[0].shape) == 2
    assert fault.asked < 150


def test_operations_that_are_wrong_only_together_stay():
    small = shrunk(drawn(*CHAIN, **PROGRAM), judge(lambda program: {"tanh", "cumsum"} <= set(program.forms) and program.gradient))
    assert sorted(small.forms)[-2:] == ["cumsum", "tanh"] and len(small.steps) <= 3 and small.gradient and not small.specs


def test_an_index_keeps_its_numbers_when_it_gets_another_name():
    program = drawn("jnp.tanh(x0)", "lax.dynamic_slice_in_dim(v0, k3, 2, 0)", inputs={"x0": (8, 8)}, indices={"k3": ((), 8)})
    drawn_at = program.numbers(program.inputs[1], 0)
    small = shrunk(program, judge(lambda program: any("dynamic_slice" in form for form in program.forms)))
    assert [value.name for value in small.inputs] == ["x0", "k0"] and small.forms == ("dynamic_slice_in_dim",)
    assert small.inputs[1].seed == program.inputs[1].seed and drawn_at.startswith("jnp.int32(")


def test_nothing_is_tried_when_the_time_is_over():
    program = drawn(*CHAIN, **PROGRAM)
    fault = judge(lambda program: True)
    assert shrunk(program, fault, lambda: True) == program and fault.asked == 0
