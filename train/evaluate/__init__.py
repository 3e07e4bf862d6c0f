"""Evaluation of a model: the loss of texts, and the tasks of lm-evaluation-harness, under the rules of a run.

Everything is made of rows of tokens, some of which are scored (`likelihood.py`). Texts become rows by windows (`text.py`), and tasks by an
adapter to the harness (`harness.py`), the only file that imports it.
"""
