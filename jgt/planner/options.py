"""XLA's flags as options of one compilation.

A run has its flags in XLA_FLAGS. A plan gives them to one compilation, because XLA reads XLA_FLAGS only once. The two differ: an option is
a field of XLA's DebugOptions and has one name, but XLA_FLAGS also knows former names of flags, and accepts flags that no longer do
anything. A plan must be of the program that runs. So flags are translated, and those that cannot be are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import jax

_RENAMED = {f"xla_gpu_enable_pipelined_{kind}": f"xla_gpu_pipeline_{kind}" for kind in ("all_gather", "all_reduce", "reduce_scatter")}
"""The names of flags since jaxlib 0.11, by their former ones. The former values are booleans, the present ones are modes."""
_MODES = {"true": "COLLECTIVE_PIPELINING_MODE_ON", "false": "COLLECTIVE_PIPELINING_MODE_DEFAULT"}
_BOOLEANS, _DIGITS = {"true": True, "false": False}, {"1": True, "0": False}
_REFUSAL = re.compile(r"No such compile option: '(\w+)'|While setting option (\w+),")


def compile_with(lowered: jax.stages.Lowered, flags: Mapping[str, str]) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """A program compiled with these flags of XLA, and the names of flags that XLA refuses as options. It is compiled without those."""
    spellings = {name: _spellings(name, value) for name, value in flags.items()}
    chosen = {name: next(own) for name, own in spellings.items()}
    while True:
        try:
            compiled = lowered.compile(compiler_options=dict(option for option in chosen.values() if option))
            return compiled, tuple(name for name, option in chosen.items() if option is None)
        except RuntimeError as error:
            found = _REFUSAL.search(str(error))
            refused = [] if found is None else [name for name, option in chosen.items() if option and option[0] in found.groups()]
            if not refused:
                raise
            # XLA names one option at a time.
            chosen |= {name: next(spellings[name], None) for name in refused}


def _spellings(name: str, value: str) -> Iterator[tuple[str, str | bool]]:
    """The options that a flag may be, in the order in which to try them."""
    yield name, _BOOLEANS.get(value, value)
    if value in _DIGITS:
        yield name, _DIGITS[value]
    if name in _RENAMED and value in _MODES:
        yield _RENAMED[name], _MODES[value]
