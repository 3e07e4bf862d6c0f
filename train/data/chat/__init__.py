"""Chats as training data: from messages to rows of tokens of which only the answers are learned.

`messages.py` reads conversations in the shapes that files have. `template.py` writes them as text, `answers.py` finds the answers in that
text and encodes it, and `rows.py` puts whole conversations into rows. `source.py` opens the files of a part of the data, whose keys are in
`keys.py`.
"""
