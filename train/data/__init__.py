"""The training data: from the `data:` section of a run's YAML to batches of token ids.

Read `config.py` for the section's keys, and `paths.py` for what may be wrong with its files, then `opening.py`: `open_data` returns `Data`
(`batches.py`), which yields batches. Between the two, `sources.py` opens one source of the mixture. `files.py` finds its files. `tokens.py`
maps files that already contain token ids, and `mapped.py` notices if such a file changes while the run reads it. `documents.py` and
`columns.py` read text, out of files that `packed.py` unpacks; `encoded.py` sends it through `tokenizer.py` once and keeps the ids. All of
them end in a `Stream` (`stream.py`): one sequence of ids over many files. `batches.py` marks where documents begin in a window, if they are
to be masked from each other. The room `own` has samples that a function of the user returns, and the room `chat` conversations.
"""
