"""The words and the formulas of a mixture of experts: `config.py` has its keys, `routing.py` the choice, `balance.py` the loads."""
