"""Streams that need no code: their samples, the same ones after a resume and on any number of processes, and what is refused."""

import io
import itertools
import json
import sys
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from jgt.document import InputError
from train.config.load import load
from train.data.config import OwnData
from train.data.opening import open_own_data
from train.data.own import SampleError, open_own
from train.data.paths import path_problems
from train.settings.code.files import Code

BATCH, FILES, ROWS = 6, 4, 12
COUNT = FILES * ROWS


def opened(source, processes=1, *, seq=1, vocab=1, **keys):
    arguments = {key: keys.pop(key) for key in [*keys] if key not in ("shuffle_buffer", "resume")}
    config = OwnData(source=source, arguments=arguments, **keys)
    own = open_own(config, Code(), lambda key: "run.yaml:2", seq=seq, vocab=vocab)
    return open_own_data(own, config, seed=0, processes=processes)


def refused(source, **keys):
    with pytest.raises(InputError) as caught:
        opened(source, **keys)
    return "\n".join(caught.value.problems)


def taken(batches, count):
    return [{name: x.tolist() for name, x in batch.items()} for batch in itertools.islice(batches, count)]


def rows_of(process, processes):
    return range(process * BATCH // processes, (process + 1) * BATCH // processes)


@pytest.fixture(scope="module", params=["jsonl", "parquet"])
def folder(request, tmp_path_factory):
    from pyarrow import Table, parquet

    path = tmp_path_factory.mktemp(request.param)
    for split, number in (*(("train", n) for n in range(FILES)), ("test", FILES)):
        rows = [{"x": [i / 2, 1.0], "id": i, "text": "one"} for i in range(number * ROWS, (number + 1) * ROWS)]
        file = path / f"{split}-{number}.{request.param}"
        if request.param == "parquet":
            parquet.write_table(Table.from_pylist(rows), file, row_group_size=5)
        else:
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def source(folder):
    return f"hf:{folder}"


COLUMNS = ["x", "id"]


def test_rows_are_samples(source):
    data = opened(source, columns=COLUMNS, eval_split="test")
    (first,) = taken(data.train_batches(0, 2, range(2)), 1)
    assert first == {"x": [[0.0, 1.0], [0.5, 1.0]], "id": [0, 1]}
    assert {name: x.dtype for name, x in data.element.items()} == {"x": np.float32, "id": np.int32}
    assert [batch["id"] for batch in taken(data.eval_batches(BATCH, range(BATCH)), 9)] == [[*range(48, 54)], [*range(54, 60)]]
    assert not data.notes


def test_a_dataset_in_a_bucket_is_that_of_its_copy(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, there = (opened(one, columns=COLUMNS) for one in (source, source.replace("hf:", "hf:file://")))
    ours, theirs = (taken(data.train_batches(0, BATCH, range(BATCH)), 9) for data in (here, there))
    assert ours == theirs and list((tmp_path / "jgt/objects/blobs").iterdir())


@pytest.mark.parametrize("buffer", [0, 7])
def test_a_run_continues_bit_for_bit_wherever_it_was_stopped(source, buffer):
    keys = {"columns": COLUMNS, "shuffle_buffer": buffer, "resume": "exact"}
    straight = taken(opened(source, **keys).train_batches(0, BATCH, range(BATCH)), 16)
    last, at = opened(source, **keys), 0
    for steps in (3, 1, 7, 5):
        assert taken(last.train_batches(at * BATCH, BATCH, range(BATCH)), steps) == straight[at : at + steps]
        at += steps
        stored = last.stored(at * BATCH)
        last = opened(source, **keys)
        last.restore(at * BATCH, [stored])


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_together_see_each_sample_once_an_epoch(source, processes):
    seen = [taken(opened(source, processes, columns=COLUMNS).train_batches(0, BATCH, rows_of(p, processes)), 16) for p in range(processes)]
    for epoch in range(2):
        ids = [number for batches in seen for batch in batches[8 * epoch : 8 * epoch + 8] for number in batch["id"]]
        assert Counter(ids) == Counter(range(COUNT))


def test_a_run_continues_on_another_number_of_processes(source):
    straight = [opened(source, 2, columns=COLUMNS) for _ in range(2)]
    batches = [data.train_batches(0, BATCH, rows_of(p, 2)) for p, data in enumerate(straight)]
    for each in batches:
        taken(each, 3)
    stored = [data.stored(3 * BATCH) for data in straight]
    expected = [[*a["id"], *b["id"]] for a, b in zip(*(taken(each, 6) for each in batches), strict=True)]
    alone = opened(source, columns=COLUMNS)
    alone.restore(3 * BATCH, stored)
    assert [batch["id"] for batch in taken(alone.train_batches(3 * BATCH, BATCH, range(BATCH)), 6)] == expected


def test_a_split_may_be_a_part_of_one(source):
    data = opened(source, columns=["id"], split="train[10:]", eval_split="train[:10]")
    assert taken(data.train_batches(0, 3, range(3)), 1) == [{"id": [10, 11, 12]}]
    assert data.eval_sequences == 10
    assert opened(source, columns=["id"], eval_split="train[4:6]").eval_sequences == 2


def test_what_is_wrong_is_said_with_its_line_and_the_nearest_name(source, folder):
    def line(key):
        return f"run.yaml:2: data.{key}: "

    assert f"{line('columns')}there is no column 'idd'. Did you mean 'id'?" in refused(source, columns=["idd"])
    assert "has no split 'trian'. Did you mean 'train'?" in refused(source, split="trian")
    assert refused(source, eval_split="train[:5%]").startswith(f"{line('eval_split')}'{folder}' has no split 'train[:5%]'. ")
    assert "Some rows of it are train[A:B]" in refused(source, split="all")
    assert f"{line('name')}'{folder}' cannot be opened: ValueError: BuilderConfig 'en' not found. Available: " in refused(source, name="en")
    assert f"{line('colums')}hf has no argument 'colums'. Did you mean 'columns'?" in refused(source, colums=["x"])
    assert "data.source: hf:" in refused(source) and "text is a value of type str_, not an array of numbers" in refused(source)
    assert f"Did you mean '{folder}'?" in refused(f"{source}s/")


def test_a_readme_chooses_no_files_outside_of_its_folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for place in (tmp_path, inner):
        (place / "rows.jsonl").write_text('{"id": 3}\n')
    for file, is_inside in (("rows.jsonl", True), ("../rows.jsonl", False), ("../inner/rows.jsonl", True)):
        (inner / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {file}\n---\n")
        if is_inside:
            assert taken(opened(f"hf:{inner}").train_batches(0, 1, [0]), 1) == [{"id": [3]}]
        else:
            assert f"data.source: '{inner}' names '{tmp_path}/inner/../rows.jsonl', which is outside of it." in refused(f"hf:{inner}")


def test_the_package_and_a_name_are_needed_before_jax_starts(monkeypatch):
    monkeypatch.setattr("train.data.paths.is_installed", lambda package: package != "datasets")
    assert [*path_problems(OwnData(source="hf:a/b"))] == [("source", "hf needs the package datasets. Install it: pip install 'jgt[hf]'")]
    with pytest.raises(InputError, match=r"data\.source: hf: needs a name behind it, such as hf:NAME"):
        load({"data": {"source": "hf:"}})
    with pytest.raises(InputError, match=r"data\.source: data of your own needs a loss of your own"):
        load({"data": {"source": "hf:a/b"}})


# -- texts -------------------------------------------------------------------------------------------------------


SEQ = 7


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    written = []
    for number in range(4):
        # Shorter than a row, and longer than several.
        lines = ["".join(map(chr, random.integers(97, 122, n))) for n in random.integers(0, 40, 9)]
        (folder / f"train-{number}.jsonl").write_text("".join(json.dumps({"content": line, "id": 0}) + "\n" for line in lines))
        written += lines
    return f"hf:{folder}", written


def test_texts_are_rows_of_tokens(texts):
    source, written = texts
    tokens = [*b"".join(text.encode() + b"\0" for text in written)]
    rows = (len(tokens) - 1) // SEQ
    data = opened(source, text="content", seq=SEQ, vocab=256)
    (batch,) = taken(data.train_batches(0, rows, range(rows)), 1)
    assert batch["inputs"] == [tokens[n * SEQ : n * SEQ + SEQ] for n in range(rows)]
    assert batch["targets"] == [tokens[n * SEQ + 1 : n * SEQ + SEQ + 1] for n in range(rows)]
    assert {*itertools.chain(*batch["weights"])} == {1.0} and data.tokenizer.decode([97]) == "a"
    assert {name: x.dtype for name, x in data.element.items()} == {"inputs": np.int32, "targets": np.int32, "weights": np.float32}


@pytest.mark.parametrize(("processes", "buffer"), [(1, 0), (1, 5), (2, 0), (3, 0)])
def test_rows_of_texts_continue_bit_for_bit_wherever_they_were_stopped(texts, processes, buffer):
    keys = {"text": "content", "seq": SEQ, "vocab": 256, "shuffle_buffer": buffer, "resume": "exact"}
    straight = [opened(texts[0], processes, **keys).train_batches(0, BATCH, rows_of(p, processes)) for p in range(processes)]
    expected = [taken(batches, 40) for batches in straight]
    last, at = [opened(texts[0], processes, **keys) for _ in range(processes)], 0
    for steps in (1, 1, 3, 13, 22):
        for p, data in enumerate(last):
            assert taken(data.train_batches(at * BATCH, BATCH, rows_of(p, processes)), steps) == expected[p][at : at + steps]
        at += steps
        stored = [data.stored(at * BATCH) for data in last]
        last = [opened(texts[0], processes, **keys) for _ in range(processes)]
        for data in last:
            data.restore(at * BATCH, stored)


def test_what_is_wrong_with_texts_is_said(texts, tmp_path):
    keys = {"seq": SEQ, "vocab": 256}
    assert "data.text: there is no column 'contnt'. Did you mean 'content'?" in refused(texts[0], text="contnt", **keys)
    assert "data.columns: text names the only column that is read" in refused(texts[0], text="content", columns=["id"], **keys)
    assert "ValueError: the column id is int64, not text" in refused(texts[0], text="id", **keys)
    assert "data.tokenizer: bytes has 256 ids, and model.vocab is 9. Set model.vocab=256" in refused(texts[0], text="content", vocab=9)
    assert "data.tokenizer: " in refused(texts[0], text="content", tokenizer=str(tmp_path / "none.json"), **keys)


def test_texts_need_no_loss_of_the_users_own(texts):
    config = load({"data": {"source": texts[0], "text": "content"}}).config
    assert config.data.tokenizer_name == "bytes" and config.train.loss is None
    for keys in ({"source": "mine:data", "text": "content"}, {"source": texts[0]}):
        with pytest.raises(InputError, match="needs a loss of your own"):
            load({"data": keys})


# -- tar files -----------------------------------------------------------------------------------------------------


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def npy(x):
    np.save(buffer := io.BytesIO(), x)
    return buffer.getvalue()


def picture(number):
    Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(buffer := io.BytesIO(), "png")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    for split, number in (*(("train", n) for n in range(FILES)), ("test", FILES)):
        with tarfile.open(folder / f"{split}-{number}.tar", "w", format=tarfile.PAX_FORMAT if number % 2 else tarfile.GNU_FORMAT) as tar:
            (folder_entry := tarfile.TarInfo("folder")).type = tarfile.DIRTYPE
            tar.addfile(folder_entry)
            for i in range(number * ROWS, (number + 1) * ROWS):
                # A long name has a header of its own.
                name = f"{'long' * (30 * (i % 3))}/{i:04}"
                add(tar, f"{name}.cls", str(i).encode())
                add(tar, f"{name}.x.npy", npy(np.float32([i, 1])))
                add(tar, f"{name}.png", picture(i))
                add(tar, f"{name}.json", json.dumps({"id": i, "caption": "one"}).encode())
                add(tar, f"{name}.wav", b"??")
    return folder


@pytest.fixture(scope="module")
def tar_source(tars):
    return f"tar:{tars}/train-*.tar"


def test_members_are_decoded_by_their_endings(tar_source, tars):
    data = opened(tar_source, columns=["cls", "x.npy", "png", "id"], eval_path=f"{tars}/test-4.tar")
    batch = next(data.train_batches(0, 14, range(14)))
    assert batch["cls"].tolist() == batch["id"].tolist() == [*range(14)]
    np.testing.assert_array_equal(batch["x.npy"][:, 0], range(14))
    assert batch["png"].dtype == np.uint8 and batch["png"].shape == (14, 4, 5, 3)
    np.testing.assert_array_equal(batch["png"][13], 13)
    assert [x["id"] for x in taken(data.eval_batches(ROWS, range(ROWS)), 2)] == [[*range(48, 60)]]


def test_tars_in_a_bucket_are_those_of_their_copies(tar_source, tmp_path):
    keys = {"columns": ["id"], "shuffle_buffer": 7}
    by_url = opened(tar_source.replace("tar:", "tar:file://"), cache=str(tmp_path), cache_bytes=10**9, **keys)
    ours, theirs = (taken(data.train_batches(0, BATCH, range(BATCH)), 16) for data in (by_url, opened(tar_source, **keys)))
    assert ours == theirs and len(list((tmp_path / "blobs").iterdir())) == FILES
    assert "cache_bytes: must be a whole number, not '1GB'" in refused(tar_source, cache_bytes="1GB")


@pytest.mark.parametrize(("shards", "buffer"), [(1, 0), (1, 7), (3, 0), (6, 0)])
def test_tars_continue_bit_for_bit_and_each_sample_is_read_once_an_epoch(tar_source, shards, buffer):
    keys = {"columns": ["id"], "shuffle_buffer": buffer, "resume": "exact"}
    seen = []
    for process in range(shards):
        rows = rows_of(process, shards)
        straight = taken(opened(tar_source, shards, **keys).train_batches(0, BATCH, rows), 16)
        last, at = opened(tar_source, shards, **keys), 0
        for steps in (3, 1, 7, 5):
            assert taken(last.train_batches(at * BATCH, BATCH, rows), steps) == straight[at : at + steps]
            at += steps
            places = json.loads(last.stored(at * BATCH))
            last = opened(tar_source, shards, **keys)
            # The other processes know the places of their shards.
            others = {str(shard): {} for shard in range(shards)}
            last.restore(at * BATCH, [json.dumps({"shards": shards, "positions": others | places["positions"]})])
        seen += straight
    ids = Counter(number for batch in seen for number in batch["id"])
    # With 3 shards, one of them has two of the four files, and is in its first epoch still.
    assert set(ids) == set(range(COUNT)) and (shards == 3 or set(ids.values()) == {2})


def test_what_is_wrong_with_a_tar_is_said(tar_source, tars, tmp_path, monkeypatch):
    assert "train-0.tar: /0000.wav: is not one of json, npy, cls, txt, jpg, jpeg, png, webp. Leave it out" in refused(tar_source)
    assert "0000.cls: the sample has no 'clas'. Did you mean 'cls'?" in refused(tar_source, columns=["clas"])
    assert "data.colums: tar has no argument 'colums'. Did you mean 'columns'?" in refused(tar_source, colums=["cls"])
    whole, vast = (tars / "train-0.tar").read_bytes(), tarfile.TarInfo("0.cls")
    vast.size = 1 << 60
    for name, content, why in (
        ("cut", whole[: len(whole) // 2 + 100], ".*unexpected end of data"),
        ("vast", vast.tobuf(tarfile.GNU_FORMAT) + bytes(1024), f"0.cls: has {1 << 60:,} bytes by its header, more than"),
        ("mixed", whole[:2560] + b"?" * 512 + whole[3072:], "damaged at byte 2,560"),
        ("hole", whole[:2560] + bytes(1024) + whole[3584:], "damaged at byte 2,560, where it ends, but there is more behind"),
        ("one hole", whole[:2560] + bytes(512) + whole[3072:], "damaged at byte 2,560"),
        ("two", whole + whole, "damaged at byte .*several tar files in one"),
        ("member", whole[:2560], "cut at byte 2,560: a whole tar file ends with blocks of zeros"),
        ("far", whole + bytes(3 << 20) + b"?", "damaged at byte"),
        ("empty", b"", "empty file"),
    ):
        (tmp_path / f"{name}.tar").write_bytes(content)
        with pytest.raises((InputError, SampleError), match=rf"{name}\.tar: {why}"):
            taken(opened(f"tar:{tmp_path}/{name}.tar", columns=["cls"]).train_batches(0, 1, [0]), 20)
    with tarfile.open(tmp_path / "pickle.tar", "w") as tar:
        add(tar, "a.npy", npy(np.array([{}], object)))
    assert r"pickle.tar: a.npy: Object arrays cannot be loaded" in refused(f"tar:{tmp_path}/pickle.tar")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "0000.png: needs the package pillow" in refused(tar_source, columns=["png"])


def test_the_files_are_looked_for_before_jax_starts(tars):
    def problems(source, **arguments):
        return [f"{key}: {message}" for key, message in path_problems(OwnData(source=source, arguments=arguments))]

    assert not problems(f"tar:{tars}/train-*.tar", eval_path=f"{tars}/test-4.tar")
    assert problems(f"tar:{tars}/*.tra")[0].startswith(f"source: no file matches {tars}/*.tra")
    assert problems(f"tar:{tars}/*.tar", eval_path=3)[0].startswith("eval_path: no such file or folder: 3")
    assert "is training data too" in problems(f"tar:{tars}/*.tar", eval_path=f"{tars}/test-4.tar")[0]
    assert "its name must end in .tar" in problems(f"tar:{__file__}")[0]
