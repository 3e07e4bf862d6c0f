"""Experts in four bits: each part equals that of the products bit for bit, only its bytes are read, and what does not fit is named."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_models import GOLDENS, config_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_families import LEAST

import jgt
from train.export.form import form_of
from train.models.decoder import build
from train.weights.described import described_by, published
from train.weights.four_bits import FourBits
from train.weights.load import open_files
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

TOLD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
UP, DOWN = (f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def product(blocks, scales):
    """The matrices [E, in, out] of blocks, number by number."""
    made = np.zeros((*scales.shape[:2], scales.shape[2] * 32), np.float32)
    for *place, group in np.ndindex(*scales.shape):
        for n, byte in enumerate(blocks[*place, group]):
            for half, code in enumerate((byte % 16, byte // 16)):
                made[*place, 32 * group + 2 * n + half] = NUMBERS[code] * 2.0 ** (int(scales[*place, group]) - 127)
    return made.swapaxes(1, 2)


def in_four_bits(path, *, change=lambda tensors: None, told=TOLD):
    """The golden gpt-oss with experts in four bits, and with their products."""
    folder, rng = open_folder(GOLDENS / "gpt_oss"), np.random.default_rng(0)
    four, plain = {}, {}
    for name in folder.tensors:
        array = folder.read(name).astype(np.float32)
        if array.ndim == 3:
            experts, size_in, size_out = array.shape
            four[f"{name}_blocks"] = rng.integers(0, 256, (experts, size_out, size_in // 32, 16), np.uint8)
            four[f"{name}_scales"] = rng.integers(120, 128, (experts, size_out, size_in // 32), np.uint8)
            plain[name] = product(four[f"{name}_blocks"], four[f"{name}_scales"])
        else:
            four[name] = plain[name] = array
    change(four)
    config = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    for part, tensors, values in (("four", four, {**config, "quantization_config": told}), ("plain", plain, config)):
        shapes = {key: (array.dtype, array.shape) for key, array in tensors.items()}
        pieces = ((key, (), array) for key, array in tensors.items())
        write_folder(path / part, shapes, pieces, files={"config.json": json.dumps(values).encode()}, max_file_bytes=40_000)
    return path / "four", path / "plain"


def loaded(path, place):
    config = dataclasses.replace(config_of("gpt_oss"), hf=None)
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    return open_files(published(path), config, shapes).load(shapes, jax.tree.map(place, shapes))


def here(_):
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def counted(monkeypatch):
    """The bytes of each read."""
    reads, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: reads.append(sum(map(len, views))) or real(file, views, at))
    return reads


@pytest.mark.parametrize("axes", [("a", "b", None), (None, "a", "b"), (None, "b", "a")], ids=str)
def test_parameters_are_the_products_bit_for_bit_from_any_shards(axes, tmp_path):
    four, plain = in_four_bits(tmp_path)
    devices = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def split(x):
        # Parts of 8 and 16 inputs begin inside of blocks.
        return NamedSharding(devices, PartitionSpec(*([None] * (x.ndim - 3)), *axes) if x.ndim == 4 else PartitionSpec())

    wanted = loaded(plain, here)
    for place in (here, split):
        jax.tree.map(np.testing.assert_array_equal, loaded(four, place), wanted)


def test_no_more_is_read_than_a_part_and_its_scales(tmp_path, monkeypatch):
    four, plain = in_four_bits(tmp_path)
    files, wanted = FourBits.of(open_folder(four)), open_folder(plain)
    reads = counted(monkeypatch)
    # Two experts, inputs 40 to 59 in the second of two blocks, and seven outputs; every second output of all experts.
    for name, place, blocks in (
        (DOWN, (slice(1, 3), slice(40, 60), slice(3, 10)), 2 * 7),
        (UP, (slice(4), slice(32), slice(1, 128, 2)), 4 * 64),
    ):
        reads.clear()
        part = files.read(name, place)
        assert sum(reads) == blocks * (16 + 1)
        np.testing.assert_array_equal(part, wanted.read(name)[place])


def test_the_whole_model_reads_each_byte_once(tmp_path, monkeypatch):
    path, _ = in_four_bits(tmp_path)
    reads = counted(monkeypatch)
    loaded(path, here)
    folder = open_folder(path)
    # Where single numbers alternate, what is between is read as well, but for the first number, which is no part of `up`.
    twice = sum(4 * 4 * (128 - 1) for name in folder.tensors if name.endswith("gate_up_proj_bias"))
    assert sum(reads) == sum(tensor.nbytes for tensor in folder.tensors.values()) + twice


def test_the_export_is_not_in_four_bits(tmp_path):
    path, _ = in_four_bits(tmp_path)
    assert published(path).is_mxfp4
    form = form_of(dataclasses.replace(config_of("gpt_oss"), hf=str(path)), tmp_path, None, str)
    assert "quantization_config" not in form.config
    assert not described_by(form.config, Path("config.json")).is_mxfp4


def test_another_key_of_the_method_is_refused():
    config = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    with pytest.raises(jgt.InputError, match="quantization_config: zero_points: true: jgt does not know this key"):
        described_by({**config, "quantization_config": {**TOLD, "zero_points": True}}, Path("config.json"))


def changed(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop(f"{UP}_scales"), rf"{UP}_blocks in model-.*safetensors has no {UP}_scales"),
        (lambda tensors: tensors.pop(f"{UP}_blocks"), rf"{UP}_scales in model-.*safetensors has no {UP}_blocks"),
        (lambda tensors: (tensors.pop(f"{UP}_blocks"), tensors.pop(f"{UP}_scales")), rf"the tensor {UP} \[4, 32, 128\] is missing"),
        (
            changed(f"{UP}_blocks", lambda x: x[..., :8]),
            rf"{UP}_blocks in .* is uint8\[4, 128, 1, 8\], not uint8 \[experts, out, in / 32, 16\]",
        ),
        (changed(f"{UP}_blocks", lambda x: x.reshape(4, 128, 16)), rf"{UP}_blocks in .* is uint8\[4, 128, 16\], not uint8"),
        (changed(f"{UP}_blocks", lambda x: x.astype(np.int8)), rf"{UP}_blocks in .* is int8\[4, 128, 1, 16\], not uint8"),
        (
            changed(f"{DOWN}_scales", lambda x: x[..., :1]),
            rf"{DOWN}_scales in .* is uint8\[4, 32, 1\], but its blocks need uint8 \[4, 32, 2\]",
        ),
        (
            changed(f"{DOWN}_scales", lambda x: x.astype(np.float32)),
            rf"{DOWN}_scales in .* is float32\[4, 32, 2\], but its blocks need uint8",
        ),
        (
            lambda tensors: [changed(f"{UP}_{end}", lambda x: x[:2])(tensors) for end in ("blocks", "scales")],
            rf"the tensor {UP} has the shape \[2, 32, 128\], but the model needs \[4, 32, 128\]",
        ),
        (lambda tensors: tensors.update({UP: np.ones((4, 32, 128), np.float32)}), rf"{UP} in .* is there in four bits, too. Keep one"),
        (
            lambda tensors: tensors.update({"model.x_blocks": np.ones((1, 1, 1, 16), np.uint8)}),
            "model.x_blocks in .* has no model.x_scales",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, problem, tmp_path):
    path, _ = in_four_bits(tmp_path, change=change)
    with pytest.raises(jgt.InputError, match=problem):
        loaded(path, here)


def test_matrices_of_other_families_are_not_taken_for_experts(tmp_path):
    # Blocks of one matrix have no dim of experts.
    folder = open_folder(GOLDENS / "llama")
    tensors = {name: folder.read(name) for name in folder.tensors}
    name = "model.layers.0.mlp.down_proj.weight"
    del tensors[name]
    tensors |= {f"{name}_blocks": np.zeros((32, 3, 16), np.uint8), f"{name}_scales": np.zeros((32, 3), np.uint8)}
    values = {**json.loads((GOLDENS / "llama" / "config.json").read_text()), "quantization_config": TOLD}
    shapes = {key: (array.dtype, array.shape) for key, array in tensors.items()}
    pieces = ((key, (), array) for key, array in tensors.items())
    write_folder(tmp_path / "hf", shapes, pieces, files={"config.json": json.dumps(values).encode()}, max_file_bytes=1 << 30)
    config = config_of("llama")
    wanted = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    with pytest.raises(jgt.InputError, match=rf"{name}_blocks in model.safetensors is uint8\[32, 3, 16\], not uint8 \[experts, out"):
        open_files(published(tmp_path / "hf"), config, wanted)
    assert described_by({"model_type": "llama", **LEAST, "quantization_config": TOLD}, Path("config.json")).is_mxfp4
