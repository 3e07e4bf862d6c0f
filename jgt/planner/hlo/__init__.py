"""Reads the text of a compiled program, `compiled.as_text()`, which is the only full record of what XLA made of a JAX function.

`instruction` reads one line, `text` the whole program and its source locations, and `graph` follows calls and values through it. On these
stand three questions: which signal does an instruction belong to (`origin`), what does it send and between which devices (`collectives`,
`groups`), and how much work is it (`kernels`, `custom_calls`). Read `instruction` first. Nothing here knows a chip or judges: `jgt.planner`
predicts a step from these facts, and `jgt.planner.profile` explains a measured one by them.
"""
