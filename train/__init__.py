"""The trainer: `python -m train --config FILE`."""
