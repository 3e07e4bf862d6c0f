"""Evaluation of a model under the rules of a run: the loss of texts, and the tasks of lm-evaluation-harness.

Everything is made of rows of tokens, some of which are scored (`likelihood.py`). Texts become rows by windows (`text.py`), and tasks by an
adapter to the harness (`harness.py`), the only file that imports it.
"""
