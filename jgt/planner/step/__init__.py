"""What a predicted step means: when it does what, how fast and how dear it is, and what a change of a key would give.

`spans.py` draws its seconds over time, `speed.py` makes tokens/s, MFU and cost of them, and
`advice.py` asks what each of the user's keys could save.
"""
