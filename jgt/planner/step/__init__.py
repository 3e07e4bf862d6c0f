"""What a predicted step means: what its time is spent on, how fast and how dear it is, and what a change of a key would give.

`breakdown.py` sorts the seconds by their kind, `spans.py` draws them over time, `speed.py` makes tokens/s, MFU and cost of them, and
`advice.py` asks what each of the user's keys could save.
"""
