"""A finder of programs that XLA computes wrongly when they are split over devices: drawn, judged, shrunk, and run through `jgt.shard`.

`program.py` has a program as data and `grammar.py` draws it, `layouts.py` lays it out, `judge.py` decides whether its numbers are right. A
process of its own does that (`worker.py`), because XLA's compiler may abort; `campaign.py` sends it jobs, and `shrink.py` and `classes.py`
make what it finds readable. Nothing else imports this room; the command table names it.
"""
