"""Runs a schedule: a loss whose layer scan goes over the stages of a mesh axis, microbatch by microbatch, in one SPMD program.

`staging.py` has `jgt.Pipeline`, the object that a caller passes, which puts a call into stages; `microbatches.py` says which inputs are
cut into microbatches. Then read `pipelined.py`: it is the function that a user's loss becomes. `split.py`, `peel.py` and
`whole_program.py` cut the traced loss into parts, `executor.py` runs them, and `loop.py`, `stage.py` and `layer.py` are what happens in a
tick, on a stage and in a layer. `layout.py` says which axes split which value, and `moves.py` takes values from one layout or stage to
the next. The schedules themselves, as tables of integers, are `jgt.schedule`'s; `ticks.py` turns a table into arrays.

The parts pass lists of arrays to each other, in the order of the variables in `Split`. For a decoder with 8 layers,
a batch of 16 rows, 4 microbatches and 2 data shards, so 2 rows in each part:

    list         contains                                                     for example
    weights      parameters that the layers are scanned over                  [8, embed, ffn]; one layer's: [embed, ffn]
    common       parameters that embedding, head or every layer read whole    an embedding table [vocab, embed]
    inputs       the loss's arguments besides the parameters                  tokens [16, seq]
    statistics   sums of inputs over the whole batch, known beforehand        the number of tokens that are not padding, []
    local        values that layers read of one part's inputs alone           a mask [2, seq, seq]
    travel       values that go from chunk to chunk with a part               the activation [2, seq, embed]
    totals       numbers that the parts bring out, added up over the batch    the sum of token losses, []
    seeds        the derivative of the loss by each total                     1 / number of tokens, []

Values with gradients are floats; `arrays.py` separates them from the rest of a list. Random keys travel as their bits.
"""
