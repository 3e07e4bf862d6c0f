"""The bytes that a layout needs to send, from the traced program alone. Read `formulas.py` first."""
