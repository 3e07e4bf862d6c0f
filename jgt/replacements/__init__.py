"""Pieces of a program that a rule replaces by other equations of the same meaning.

`replacement` is the interface of all of them. Most use `device_plan`: an equation that means one thing and runs as another on each device.
`overlap` finds the matmuls that `overlap:` is about, `proof` shows that each is a matmul, and `ring` has the programs that hide what tensor
parallelism sends beside them.
"""
