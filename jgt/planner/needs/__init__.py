"""The bytes that a layout needs to send, from the traced program alone.

Read `formulas.py` first, which has the textbook's formulas. `usage.py` counts what they multiply, along the arrays
made of one parameter (`views.py`) and the collectives that the program names itself (`sends.py`).
"""
