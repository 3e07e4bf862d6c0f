"""The search for a layout: mesh, rules, pipeline, recompute and parts of the batch, for the run and the devices that a user names.

`space.py` lists what could be tried and what the user's file leaves open. `estimate.py` orders it, and learns from every plan. `plans.py`
plans candidates in processes of their own and remembers the plans. `search.py` goes from one to the other, best first. `answer.py` prints
the result and writes the run's file.
"""
