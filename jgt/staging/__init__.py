"""A call put into a pipeline, and what the batch has to do with it.

`pipeline` is `jgt.Pipeline`, the object that a caller passes. `staging` puts a call into stages, `microbatches` says which inputs are cut
into microbatches, and `joined` how results of parts of a batch are joined.
"""
