"""A program as a file of at most fifteen lines of plain JAX, which prints what is wrong."""

from __future__ import annotations

import re

from jgt.conformance.program import AXES, HELPERS, DrawnProgram

_MOST_LINES = 15
_VERDICT = re.compile(r"^(value|gradient) \w+: (\d+) of \d+ numbers are wrong", re.MULTILINE)


def listing(program: DrawnProgram, draw: int, *, one_device: bool = False) -> str:
    """The file of a program with one draw of its arguments. one_device: it compares a compiled program without a mesh."""
    names = [value.name for value in program.arguments]
    inputs = ", ".join(value.name for value in program.inputs)
    constrain = "lambda x, *spec: x" if one_device else "lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))"
    axes = tuple(AXES[: len(program.mesh)])
    made = f"mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape{program.mesh}, {axes})"
    head = [
        f'import os; os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={1 if one_device else program.num_devices}"',
        "import jax, jax.numpy as jnp, numpy as np; from jax import lax; from jax.sharding import NamedSharding, PartitionSpec as P",
        *([] if one_device else [made]),
        "r = lambda seed, *shape: np.random.RandomState(seed).randn(*shape)",
        *(text for name, text in HELPERS.items() if any(f"{name}(" in step.code for step in program.steps)),
        f"def f(W, {inputs}):",
    ]
    run = "f"
    tail = [f"arguments = {', '.join(program.numbers(value, draw) for value in program.arguments)},"]
    if program.gradient:
        moved, run = ", ".join(program.moved), "run"
        cotangents = ", ".join(names[len(program.inputs) :])
        tail = [
            f"def run(W, {', '.join(names)}):",
            f"    value, pull = jax.vjp(lambda {moved}: f(W, {inputs}), {moved}); return value, pull(({cotangents},))",
            *tail,
        ]
    what = [f"value {name}" for name in program.outputs] + [f"gradient {name}" for name in program.moved if program.gradient]
    tail += [
        f"with jax.disable_jit(): right = jax.tree.leaves({run}(lambda x, *spec: x, *arguments))",
        f"found = jax.tree.leaves(jax.jit(lambda *a: {run}({constrain}, *a))(*arguments))",
        f"for what, a, b in zip({what}, map(np.float64, found), map(np.float64, right)):",
        "    bad = ~np.isclose(a, b, 0.01, 0.01, equal_nan=True)",
        '    print(f"{what}: {bad.sum()} of {bad.size} numbers are wrong: {a[bad][:4]} instead of {b[bad][:4]}")',
    ]
    body = _body(program, _MOST_LINES - len(head) - len(tail))
    return "\n".join([*head, *body, *tail]) + "\n"


def is_wrong(printed: str) -> bool:
    """Whether a listing has printed that a number is wrong."""
    return any(count != "0" for _, count in _VERDICT.findall(printed))


def _body(program: DrawnProgram, most: int) -> list[str]:
    """The lines of the function, several steps on a line where there are too many."""
    lines = [f"{value.name} = {_split(program, value.name, value.name)}" for value in program.inputs if value.name in program.specs]
    lines += [f"{step.name} = {_split(program, step.name, step.code)}" for step in program.steps]
    lines.append(f"return {', '.join(program.outputs)},")
    while len(lines) > max(most, 1):
        shortest = min(range(len(lines) - 1), key=lambda n: len(lines[n]) + len(lines[n + 1]))
        lines[shortest : shortest + 2] = ["; ".join(lines[shortest : shortest + 2])]
    return [f"    {line}" for line in lines]


def _split(program: DrawnProgram, name: str, code: str) -> str:
    """The code of a value with its constraint."""
    if name not in program.specs:
        return code
    entries = (repr(axes) if len(axes) > 1 else repr(axes[0]) if axes else "None" for axes in program.specs[name])
    return f"W({', '.join([code, *entries])})"
