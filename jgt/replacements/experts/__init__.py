"""Mixtures of experts: rows that go through the experts chosen for them, on devices that share the experts.

`call` is a model's call (`jgt.signal.experts`), whose rows it sorts. `experts` is the replacement that puts exchanges into a traced
program, by the rules. `exchange` has the device plans of an exchange, and `dispatch` the program of a device, which brings rows to the
experts and back. `top_k` runs the choice on each device's rows, `local` has the experts of one device in the stages of a pipeline,
and `grouped` runs `jax.lax.ragged_dot` for each group's rows alone.
"""
