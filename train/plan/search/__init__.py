"""The search for a layout: mesh, rules, pipeline, recompute and parts of the batch, for the run and the devices that a user names.

`space.py` lists what could be tried and what the user's file leaves open. `estimate.py` orders it. `plans.py` plans layouts in other
processes and remembers the plans. `search.py` goes from one to the other, best first. Nothing here imports JAX: the command `jgt plan
--search` and `train.auto`, which need it, are in train/plan.
"""
