"""Rules applied to a program: read `sharded` first, then `call`, which has the whole way on one page.

sharded      the wrapped function: calls, placement, init, and the cached trace behind all three
checks       what callers pass, and what to pass instead
arguments    one call's arguments, and its trace; variables: the variables of Flax nnx among them, which change in place
inputs       arguments besides the parameters: their names in trees, which are state, and their rules
call         trace → parameters and inputs placed → program rewritten → ready to run; argument_specs: the rules on parameters and inputs
rewrite      constraints put into the program; answers: what the rules say about its values; saves: remat policies by tensor name
placement    the result: shardings of parameters, gradients, optimizer state and inputs; storage: their form between steps
staged       what a pipeline is here: an object that a caller passes
matrices     functions of whole matrices on sharded stacks, for Muon
"""
