"""Published weights: folders of safetensors files, as Hugging Face's libraries read and write them.

`safetensors.py` opens a folder and reads any part of a tensor. `writing.py` writes one. Neither imports JAX.
"""
