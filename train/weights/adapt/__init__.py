"""Adapters: low-rank updates of a model's matrices, which are trained in the place of the matrices (`lora:`)."""
