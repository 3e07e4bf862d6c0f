"""Decoders in Flax nnx that know signals and nothing else of jgt."""
