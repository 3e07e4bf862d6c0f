"""Code of the user's own in a run: its files (`files.py`), and objects by their names in it (`names.py`)."""
