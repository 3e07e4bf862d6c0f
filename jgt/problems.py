"""Messages for what does not fit: which dim, both sizes, the rule's line, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jgt.rules.spec import Misfit, SpecRule, misfits


def misfit_problems(
    rule: SpecRule, dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], mesh: Mapping[str, int], what: str, *, label: str = ""
) -> Iterator[str]:
    """One problem for each dim of `shape` that its axes do not divide; `label` stands for a rule whose pattern says nothing."""
    for misfit in misfits(dims, shape, mesh):
        yield misfit_problem(rule, misfit, shape, mesh, what, label=label)


def misfit_problem(
    rule: SpecRule, misfit: Misfit, shape: tuple[int, ...], mesh: Mapping[str, int], what: str, *, label: str = ""
) -> str:
    """`file:line: pattern: dim 1 of ... has size 6, which tensor=4 does not divide. ...`"""
    axes = " x ".join(f"{axis}={mesh[axis]}" for axis in misfit.axes)
    product = f" (= {misfit.parts})" if len(misfit.axes) > 1 else ""
    return (
        f"{rule.where}: {label or rule.pattern}: dim {misfit.dim} of the {what} {list(shape)} has size {misfit.size}, "
        f"which {axes}{product} does not divide. {remedy(misfit)}"
    )


def remedy(misfit: Misfit) -> str:
    """What would fit: the sizes on either side, and the products of axes that divide this one."""
    below = misfit.size - misfit.size % misfit.parts
    sizes = f"{below} or {below + misfit.parts}" if below else f"{misfit.parts}"
    low = [n for n in range(1, math.isqrt(misfit.size) + 1) if misfit.size % n == 0]
    divisors = ", ".join(str(n) for n in sorted({*low, *(misfit.size // n for n in low)}) if n < misfit.parts)
    over = " x ".join(misfit.axes)
    return f"A size of {sizes} would fit, or {over} of {divisors}"
