"""Rules applied to a program. `shard` is the door; read it first, then `call`, which has the whole way on one page.

shard        the wrapped function: calls, placement, init, and the cached trace behind all three
checks       what callers pass, and what to pass instead
arguments    one call's arguments, and its trace; variables: those of Flax nnx among them, which change in place
inputs       arguments besides the parameters: their names, which are state, and their rules; paths: leaves and their names
call         trace → parameters and inputs placed → program rewritten → ready to run; argument_specs: the rules on parameters and inputs
rewrite      constraints put into the program; answers: what the rules say about its values; saves: remat policies by tensor name
placement    the result: shardings of parameters, gradients, optimizer state and inputs
staging      the same call run by a pipeline; microbatches: what its inputs are
matrices     functions of whole matrices on sharded stacks, for Muon
"""
