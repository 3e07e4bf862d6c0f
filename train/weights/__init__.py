"""Published weights: a folder of Hugging Face names a model, and its files hold the parameters.

`described` reads config.json into the keys of the `model:` section. `families` has a row for each family: how it writes its options, and
the names of its tensors. `names` maps the model's parameters to tensors, in both directions. `safetensors` opens a folder and reads any
part of a tensor, `eight_bits` with its scales, and `writing` writes one. `load` puts tensors into shards, and `base` finds the folder
that holds the frozen parameters of a checkpoint; only these two import JAX, so that a config.json is read where nothing else is
installed. For exports, `origin` keeps the small files of the model that a run began from, and `describing` writes the config.json of a
model that began from nothing.
"""
