"""Files in eight bits: each part equals that part of the dequantised matrix bit for bit, and only its own bytes are read."""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDENS, config_of, expected
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_families import LEAST

import jgt
from train.export.form import form_of
from train.models.decoder import build
from train.weights.described import described_by, published
from train.weights.eight_bits import EightBits
from train.weights.load import open_files
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = (5, 7)
"""No divisor of any dim, as with blocks of 128 in some published models."""
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
WHOLE = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


def rounded(matrix, block):
    """The matrix in eight bits, its scales, and their product in f32."""
    rows, columns = block or matrix.shape
    grid = [-(-size // step) for size, step in zip(matrix.shape, (rows, columns), strict=True)]
    eight, scales = np.zeros(matrix.shape, E4M3), np.zeros(grid, np.float32)
    product = np.zeros(matrix.shape, np.float32)
    for i, j in np.ndindex(*grid):
        place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scales[i, j] = np.abs(matrix[place]).max() / 448
        eight[place] = (matrix[place] / scales[i, j]).astype(E4M3)
        product[place] = eight[place].astype(np.float32) * scales[i, j]
    return eight, scales if block else scales.reshape(()), product


def in_eight_bits(path, name, told, *, end="weight_scale_inv", change=None):
    """A golden folder with the matrices of its layers in eight bits, and one with the products."""
    folder, block = open_folder(GOLDENS / name), told.get("weight_block_size")
    eight, plain = {}, {}
    for key in folder.tensors:
        array = folder.read(key).astype(np.float32)
        if array.ndim == 2 and ".layers." in key and ".gate.weight" not in key:
            eight[key], eight[key.replace("weight", end)], plain[key] = rounded(array, block)
            if not block:
                eight[key.replace("weight", "input_scale")] = np.float32(1)
        else:
            eight[key] = plain[key] = array
    config = json.loads((GOLDENS / name / "config.json").read_text())
    for part, tensors, values in (("eight", eight, {**config, "quantization_config": told}), ("plain", plain, config)):
        (change or (lambda tensors: None))(tensors)
        shapes = {key: (array.dtype, array.shape) for key, array in tensors.items()}
        pieces = ((key, (), np.asarray(array)) for key, array in tensors.items())
        write_folder(path / part, shapes, pieces, files={"config.json": json.dumps(values).encode()}, max_file_bytes=20_000)
    return path / "eight", path / "plain"


def loaded(path, name, place):
    config = dataclasses.replace(config_of(name), hf=None)
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    return open_files(published(path), config, shapes).load(shapes, jax.tree.map(place, shapes))


@pytest.mark.parametrize(
    ("name", "told", "end"),
    [
        ("qwen3", BLOCKS, "weight_scale_inv"),
        ("qwen3_moe", BLOCKS, "weight_scale_inv"),
        ("phi3", BLOCKS, "weight_scale_inv"),
        ("qwen3", WHOLE, "weight_scale"),
        ("qwen3", {"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv"),
    ],
    ids=str,
)
def test_parameters_are_the_products_bit_for_bit_from_any_shards(name, told, end, tmp_path):
    eight, plain = in_eight_bits(tmp_path, name, told, end=end)
    devices = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def split(x):
        # Rows and columns of a shard begin inside of blocks.
        axes = [None] * (x.ndim - 2) + ["b", "a"][2 - min(x.ndim, 2) :]
        fits = [axis if axis and size % devices.shape[axis] == 0 else None for axis, size in zip(axes, x.shape, strict=True)]
        return NamedSharding(devices, PartitionSpec(*fits))

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = loaded(plain, name, lambda _: here)
    for place in (lambda _: here, split):
        jax.tree.map(np.testing.assert_array_equal, loaded(eight, name, place), wanted)


def test_no_more_is_read_than_a_part_and_the_scales_of_its_blocks(tmp_path, monkeypatch):
    folder = open_folder(in_eight_bits(tmp_path, "qwen3", BLOCKS)[0])
    files, reads, real = EightBits.of(folder, BLOCK), [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: reads.append(sum(map(len, views))) or real(file, views, at))
    # Rows 6 to 11 are in the blocks 1 and 2, columns 8 to 20 in 1 and 2.
    part = files.read("model.layers.0.mlp.up_proj.weight", (slice(6, 12), slice(8, 21)))
    assert (part.shape, part.dtype) == ((6, 13), np.float32)
    assert sum(reads) == 6 * 13 + 2 * 2 * 4


def test_the_whole_model_reads_each_byte_once(tmp_path, monkeypatch):
    path, reads, real = in_eight_bits(tmp_path, "qwen3", WHOLE, end="weight_scale")[0], [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: reads.append(sum(map(len, views))) or real(file, views, at))
    loaded(path, "qwen3", lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    tensors, idle = open_folder(path).tensors, "input_scale"
    assert sum(reads) == sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith(idle))


def test_logits_are_those_of_the_product_and_near_those_of_the_model(tmp_path):
    eight, plain = in_eight_bits(tmp_path, "qwen3", BLOCKS)
    model, here = build(config_of("qwen3")), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tokens, wanted, std = expected("qwen3")
    one, other = (jax.jit(model.apply)(loaded(path, "qwen3", lambda _: here), {}, tokens) for path in (eight, plain))
    np.testing.assert_array_equal(one, other)
    assert 1e-3 < np.abs(one[:, ::5] - wanted).max() / std < 0.5


def test_the_export_is_not_in_eight_bits(tmp_path):
    path = in_eight_bits(tmp_path, "qwen3", BLOCKS)[0]
    form = form_of(dataclasses.replace(config_of("qwen3"), hf=str(path)), tmp_path, None, str)
    assert "quantization_config" not in form.config
    assert described_by(form.config, Path("config.json")).block is None


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path):
    path = in_eight_bits(tmp_path, "qwen3", WHOLE, end="weight_scale")[0]
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    told = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
    }
    (path / "hf_quant_config.json").write_text(json.dumps(told))
    assert published(path).block == (0, 0)
    told["quantization"]["quant_algo"] = "NVFP4"
    (path / "hf_quant_config.json").write_text(json.dumps(told))
    with pytest.raises(jgt.InputError, match=r"hf_quant_config.json: the tensors are quantised \(modelopt\)"):
        published(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weight_block_size": [128]}, "quantization_config: weight_block_size: [128] is not the rows and the columns of a block"),
        ({"weight_block_size": [0, 128]}, "weight_block_size: [0, 128] is not the rows and the columns of a block"),
        ({"weight_block_size": 128}, "weight_block_size must be a list of at most 10,000, not 128"),
        ({"fmt": "e5m2"}, "quantization_config: fmt: 'e5m2' is not supported. Supported: 'e4m3', 'float8_e4m3fn'"),
        ({"zero_points": True}, "quantization_config: zero_points: true: jgt does not know this key"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(changes, problem):
    with pytest.raises(jgt.InputError, match=re.escape(problem)):
        described_by({"model_type": "llama", **LEAST, "quantization_config": {**BLOCKS, **changes}}, Path("config.json"))


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop(f"{UP}_scale_inv"), "has tensors of the type float8_e4m3fn"),
        (lambda tensors: tensors.update({f"{UP}_scale": np.ones(1, np.float32)}), "has tensors of the type float8_e4m3fn"),
        (lambda tensors: tensors.update({f"{UP}_scale_inv": np.ones((10, 6), np.float32)}), f"{UP} [48, 32] needs one of [10, 5] in F16"),
        (lambda tensors: tensors.update({f"{UP}_scale_inv": np.ones((10, 5), np.int32)}), f"scale {UP}_scale_inv is int32[10, 5]"),
        (lambda tensors: tensors.update({UP: tensors[UP][:40]}), "needs one of [8, 5]"),
        (lambda tensors: tensors.update({"model.x_scale_inv": np.ones(1, np.float32)}), "model.x_scale_inv [1] is not part of the model"),
    ],
)
def test_scales_that_do_not_fit_are_named(change, problem, tmp_path):
    path = in_eight_bits(tmp_path, "qwen3", BLOCKS, change=lambda tensors: change(tensors) if f"{UP}_scale_inv" in tensors else None)[0]
    with pytest.raises(jgt.InputError, match=re.escape(problem)):
        loaded(path, "qwen3", lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_a_folder_that_says_nothing_of_eight_bits_is_refused(tmp_path):
    path = in_eight_bits(tmp_path, "qwen3", BLOCKS)[0]
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(jgt.InputError, match="has tensors of the type float8_e4m3fn"):
        loaded(path, "qwen3", lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]))
