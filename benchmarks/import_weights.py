"""Memory, CPU-seconds and bytes read when a published model's files become sharded arrays, against the simplest way to do it.

python benchmarks/import_weights.py [--json] [--save] [--layers 2] [--rounds 3] [--processes 2]

A Llama of random f32 values in 4 files, `--layers 16` for 984 MB, goes onto 8 virtual CPU devices (fsdp 4 x tensor 2). The simplest way
reads all files whole, stacks the layers and puts the arrays onto the devices. Each takes turns in fresh processes. Memory is unshared
(RssAnon and RssShmem) beyond the arrays themselves. With --processes, `jgt launch` also starts a training, and each process's reads are
counted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import jgt
from benchmarks.harness import ROOT, FailedError, alternate, bar, make_parser, report, run_process, spread
from jgt import path_text
from jgt.document import Node, bind
from train.models.config import ModelConfig
from train.models.decoder import build
from train.weights.described import Described, published
from train.weights.load import open_files
from train.weights.names import sources_of

Way = Callable[[Described, ModelConfig, Any, Any], Any]
BYTES = 4
NUM_FILES = 4
MESH = {"data": 1, "fsdp": 4, "tensor": 2}
# Written into a folder that Python looks into first: counts what each process reads. A run ends without atexit, so each read is written.
COUNTER = """
import os
real, log = os.preadv, open(os.path.join(os.environ["READS"], str(os.getpid())), "a", buffering=1)
def preadv(file, views, at):
    count = real(file, views, at)
    log.write(f"{os.readlink(f'/proc/self/fd/{file}')} {at} {count}\\n")
    return count
os.preadv = preadv
"""


def main() -> None:
    """Prints the figures of both ways, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2, help="the layers of the model (2); 16 make 984 MB")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is measured (3)")
    parser.add_argument("--processes", type=int, help="also start a training with this many processes, which divide the 8 devices")
    parser.add_argument("--count", action="store_true", help="count the reads of --measure, which costs CPU-seconds")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FOLDER"), help="measure one way in this process")
    arguments = parser.parse_args()
    if arguments.measure:
        way, folder = arguments.measure
        print(json.dumps(measured(WAYS[way], Path(folder), counts=arguments.count)))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_model(folder, arguments.layers)
        try:
            found = compared(folder, arguments.rounds)
            if arguments.processes:
                found["processes"] = launched(folder, Path(place), arguments.processes)
        except FailedError as error:
            sys.exit(str(error))
    report("import_weights", found, arguments)


def write_model(folder: Path, layers: int) -> None:
    """A folder with config.json, an index and 4 files, each with every fourth tensor."""
    folder.mkdir()
    d, keys, ffn, vocab = 1024, 512, 2816, 32_000
    layer = {"input_layernorm": [d], "post_attention_layernorm": [d]}
    layer |= {"self_attn.q_proj": [d, d], "self_attn.k_proj": [keys, d], "self_attn.v_proj": [keys, d], "self_attn.o_proj": [d, d]}
    layer |= {"mlp.gate_proj": [ffn, d], "mlp.up_proj": [ffn, d], "mlp.down_proj": [d, ffn]}
    shapes = {"model.embed_tokens.weight": [vocab, d], "model.norm.weight": [d], "lm_head.weight": [vocab, d]}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in layer.items()}
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": d, "intermediate_size": ffn, "vocab_size": vocab}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))
    draw, places = np.random.default_rng(0), {}
    for number in range(NUM_FILES):
        names, header, end = list(shapes)[number::NUM_FILES], {}, 0
        for name in names:
            begin, end = end, end + int(np.prod(shapes[name])) * BYTES
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [begin, end]}
        places |= dict.fromkeys(names, f"model-{number}.safetensors")
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            text = json.dumps(header).encode()
            # As the safetensors package does, so that values are aligned.
            text += b" " * (-len(text) % 8)
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                draw.standard_normal(shapes[name], np.float32).tofile(file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def compared(folder: Path, rounds: int) -> dict[str, Any]:
    """The figures of both ways and the bars."""
    commands = {way: [sys.executable, __file__, "--measure", way, str(folder)] for way in WAYS}
    samples = alternate(commands, rounds, warmup=1)
    found: dict[str, Any] = {}
    for way, taken in samples.items():
        names = [name for name in taken[0].found if isinstance(taken[0].found[name], int | float)]
        found[way] = {name: spread(sample.found[name] for sample in taken) for name in names}
    pairs = zip(samples["streamed"], samples["whole"], strict=True)
    found["cpu_s_ratio"] = spread(a.found["cpu_s"] / b.found["cpu_s"] for a, b in pairs)
    counted = run_process([*commands["streamed"], "--count"]).found
    found["reads of streamed"] = {name: counted[name] for name in ("reads", "read_mb", "twice_mb")}
    most = 64 + 1.2 * found["streamed"]["largest_shard_mb"]["median"]
    found["bars"] = {
        "memory over the result, MB": bar(found["streamed"]["over_mb"]["median"], round(most, 1)),
        "CPU-seconds, ratio": bar(found["cpu_s_ratio"]["median"], 1.1),
        "bytes read twice": bar(counted["twice_mb"], 0),
    }
    return found


# -- one way, in a process of its own ------------------------------------------------------------------------------


def measured(way: Way, folder: Path, *, counts: bool) -> dict[str, float]:
    """What one way takes."""
    jgt.use_virtual_cpu(8)
    described = published(folder)
    config = bind(Node.of(dict(described.keys), "config.json", "model"), ModelConfig, [])
    assert config is not None
    model, mesh = build(config), jgt.make_mesh(MESH)
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    rules, tokens = jgt.load_rules("jgt:fsdp_tensor"), np.zeros((8, 16), np.int32)
    shardings = jgt.place(lambda params, tokens: model.apply(params, {}, tokens), rules, mesh, shapes, tokens, partial=True).params
    jax.block_until_ready([jax.device_put(0, device) for device in jax.devices()])
    reads, real = list[tuple[str, int, int]](), os.preadv

    def preadv(file: int, views: Any, at: int) -> int:
        reads.append((str(Path(f"/proc/self/fd/{file}").readlink()), at, count := real(file, views, at)))
        return count

    if counts:
        os.preadv = preadv
    peak, stop = [before := unshared()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak.append(unshared())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, cpu = time.perf_counter(), time.process_time()
    arrays = jax.block_until_ready(way(described, config, shapes, shardings))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    stop.set()
    watcher.join()
    leaves = jax.tree.leaves(arrays)
    shards = [shard.data.nbytes for x in leaves for shard in x.addressable_shards]
    found = {"reads": len(reads), "read_mb": sum(count for _, _, count in reads) / 1e6, "twice_mb": twice(reads) / 1e6}
    return {
        **(found if counts else {}),
        "model_mb": sum(x.nbytes for x in leaves) / 1e6,
        "largest_shard_mb": max(shards) / 1e6,
        "over_mb": (max(peak) - before - sum(shards)) / 1e6,
        "s": seconds,
        "cpu_s": cpu,
        # Both ways must make the same arrays.
        "check": float(sum(abs(x).sum() for x in leaves)),
    }


def unshared() -> int:
    """The bytes of this process's memory that are not pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def twice(reads: list[tuple[str, int, int]]) -> int:
    """The bytes that were read again."""
    again, ends = 0, dict[str, int]()
    for file, begin, count in sorted(reads):
        again += max(0, min(begin + count, ends.get(file, 0)) - begin)
        ends[file] = max(ends.get(file, 0), begin + count)
    return again


def streamed(described: Described, config: ModelConfig, shapes: Any, shardings: Any) -> Any:
    """The way of a run."""
    return open_files(described, config, shapes).load(shapes, shardings)


def whole(described: Described, config: ModelConfig, shapes: Any, shardings: Any) -> Any:
    """All files whole, stacked, then put onto the devices."""
    tensors = {}
    for file in described.path.glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            count, shape = int(np.prod(entry["shape"])), entry["shape"]
            tensors[name] = np.frombuffer(data, np.float32, count, start + entry["data_offsets"][0]).reshape(shape)
    sources = sources_of(described.family, {path_text(path): x.shape for path, x in jax.tree.leaves_with_path(shapes)}, (16, 8))

    def made(path: Any, x: Any, sharding: Any) -> Any:
        source = sources[path_text(path)]
        parts = [tensors[source.at((n,))] for n in range(x.shape[0] if source.num_stacked else 1)]
        parts = [part.T if source.is_transposed else part for part in parts]
        return jax.device_put(np.stack(parts) if source.num_stacked else parts[0], sharding)

    return jax.tree.map_with_path(made, shapes, shardings)


WAYS: dict[str, Way] = {"streamed": streamed, "whole": whole}


# -- several processes ---------------------------------------------------------------------------------------------


def launched(folder: Path, place: Path, processes: int) -> dict[str, Any]:
    """What each process of a training reads."""
    logs, code = place / "reads", place / "code"
    logs.mkdir()
    code.mkdir()
    (code / "sitecustomize.py").write_text(COUNTER)
    mesh = ", ".join(f"{axis}: {size}" for axis, size in MESH.items())
    (place / "run.yaml").write_text(
        f"run: {{dir: {place / 'run'}}}\nmodel: {{hf: {folder}, seq: 16}}\nmesh: {{{mesh}}}\nrules: jgt:fsdp_tensor\n"
        f"devices: {{virtual_cpu: {8 // processes}}}\ndata: {{source: stdlib}}\ntrain: {{steps: 1, batch: 8, eval_batches: 1}}\n"
    )
    environment = {"READS": str(logs), "PYTHONPATH": os.pathsep.join([str(code), str(ROOT)])}
    command = [sys.executable, "-m", "jgt", "launch", "--processes", str(processes), "--", str(place / "run.yaml")]
    run_process(command, environment)
    found: dict[str, Any] = {"files_mb": sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6}
    for number, log in enumerate(sorted(file for file in logs.iterdir() if file.stat().st_size)):
        rows = (line.rsplit(" ", 2) for line in log.read_text().splitlines())
        reads = [(name, int(at), int(count)) for name, at, count in rows if name.endswith(".safetensors")]
        if reads:
            found[f"process {number}"] = {"read_mb": sum(count for _, _, count in reads) / 1e6, "twice_mb": twice(reads) / 1e6}
    return found


if __name__ == "__main__":
    main()
