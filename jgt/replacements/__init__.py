"""Pieces of a program that a rule replaces by other equations of the same meaning.

`replacement` says what every replacement is. `device_plan` is the means that most of them use: an equation that means one thing and runs as
another on each device. `overlap` finds the matmuls that `overlap:` is about, `proof` shows that each is a matmul, and `ring` has the programs
that hide what tensor parallelism sends beside them.
"""
