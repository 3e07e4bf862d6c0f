"""Attention on sequences that an axis of the mesh splits, by a rule: any model's, found between the tensors q, k, v and heads.

`context` is the replacement that finds the equations, and puts in their place what the devices run. `proof` shows that the equations are
attention, by running them (`walk`), and `pairs` has the part of them that says which keys a query sees; `bounds` proves which ones no data
lets it see. `checks` says what a rule cannot have. `plans` has the device plans for a sequence that is `split`, and `device` the program of
a device: `blocks` of attention, computed by XLA or `cudnn`, and put together by their log-sum-exp.
"""
