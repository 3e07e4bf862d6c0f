"""Programs of the finder, written down instead of drawn."""

from jgt.conformance.judge import shaped
from jgt.conformance.program import DrawnArgument, DrawnProgram, Step


def drawn(*codes, inputs=None, indices=None, specs=None, mesh=(2,), dtype="float32", **more):
    """The program with these steps, v0, v1 and so on. inputs: shapes by name. indices: by name, a shape and a bound."""
    arguments = [
        DrawnArgument(name=name, shape=shape, dtype=dtype, seed=n) for n, (name, shape) in enumerate((inputs or {"x0": (8, 8)}).items())
    ]
    for name, (shape, bound) in (indices or {}).items():
        arguments.append(DrawnArgument(name=name, shape=shape, dtype="int32", seed=len(arguments), bound=bound))
    steps = tuple(Step(name=f"v{n}", shape=(), dtype="", kind="test", code=code, operand="x0", dim=0) for n, code in enumerate(codes))
    options = {"outputs": (steps[-1].name,), "gradient": False, "salt": 3} | more
    return shaped(DrawnProgram(inputs=tuple(arguments), steps=steps, mesh=mesh, specs=specs or {}, **options))
