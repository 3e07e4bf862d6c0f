"""The `sync:` section: how often the devices along a slow axis agree, and what they send. Start with `phases.py`."""
