"""Exports: the model of a run as a folder of Hugging Face, which transformers loads.

`form.py` decides what the folder says of the model, from its family or its own code. `write.py` makes the folder of a checkpoint, piece by
piece. `exports.py` does so while the run trains. All of it happens on the host: no file here needs the devices of the run.
"""
