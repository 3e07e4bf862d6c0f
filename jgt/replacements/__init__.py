"""Devices run other programs in the place of some pieces of a program, where the work of XLA's partitioner is not good enough.

A *replacement* is a rule that puts other equations of the same meaning in the place of some equations; `replacement` is the interface of
all of them. Most use `device_plan`: an equation that means one thing and runs as another on each device. `overlap` finds the matmuls that
`overlap:` is about, `proof` shows that each is a matmul, and `ring` has the programs that hide what tensor parallelism sends beside them.
`experts` is a folder: rows travel to the devices of their experts. `gradients` changes how devices add up the gradients of parameters.

*Replicas* are groups of devices along some axes of a mesh that compute for themselves, until they exchange what they have. `replicas` runs
a function once for each of them, as one program that sends nothing between them, and adds up what they have, in a type of one's choice,
also beside the layers of a model: `layers` adds work to each turn of the scan over layers, or puts a policy of jax.checkpoint around it.
"""
