"""Preferences as training data: pairs of rows, of which the answers are trained and the prompt is not."""

import json

import numpy as np
import pytest

from jgt import InputError
from jgt.command.commands import main

pytest.importorskip("jinja2")
from train.config import load
from train.data.chat.answers import TRAINED, Encoder
from train.data.chat.messages import read_better_answers, read_preferences
from train.data.chat.source import DATE, template_of
from train.data.config import DataConfig
from train.data.opening import open_data
from train.data.tokenizer import ByteTokenizer
from train.setup.program import element_of

SEQ = 48
USER, GOOD, BAD = ({"role": role, "content": content} for role, content in (("user", "Hello"), ("assistant", "Hi"), ("assistant", "What?")))
SYSTEM = {"role": "system", "content": "Be brief."}
SHAPES = {
    "texts": {"prompt": "Hello", "chosen": "Hi", "rejected": "What?"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole_conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole_conversations_and_a_text": {"prompt": "Hello", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
}


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def pairs(count):
    random = np.random.default_rng(0)

    def text():
        return "".join(random.choice([*"abcdefg"], random.integers(2, 9)))

    return [{"prompt": text(), "chosen": text(), "rejected": text() + "!"} for _ in range(count)]


@pytest.fixture
def opened(tmp_path):
    def _opened(path, seq=SEQ, **keys):
        config = DataConfig(source="preferences", path=path, **{"eval_tokens": 0, "shuffle": False, **keys})
        return open_data(config, seq=seq, vocab=256, seed=0, cache_dir=tmp_path / "cache")

    return _opened


def trained(row):
    """The text of the trained tokens of a row."""
    return bytes(row["targets"][row["weights"] == 1].tolist())


def test_a_sample_is_a_chosen_and_a_rejected_row(opened, tmp_path):
    data = opened(write(tmp_path / "a.jsonl", *SHAPES.values()))
    assert data.train_sequences == 4 and "4 pairs of a chosen and a rejected answer" in data.notes[0]
    (batch,) = data.train_batches(0, 4, range(4), 1)
    shapes = element_of(load({"model": {"seq": SEQ}, "data": {"source": "preferences"}, "train": {"loss": "dpo"}}).config, None, None)
    made, wanted = ({name: (x.shape, x.dtype) for name, x in arrays.items()} for arrays in (batch, shapes))
    assert {name: (shape[1:], dtype) for name, (shape, dtype) in made.items()} | {"reference": ((2,), np.float32)} == wanted
    for n in range(4):
        chosen, rejected = ({name: x[n, side] for name, x in batch.items()} for side in range(2))
        assert trained(chosen) == b"Hi\0" and trained(rejected) == b"What?\0"
        assert bytes(chosen["inputs"][:23].tolist()) == bytes(rejected["inputs"][:23].tolist()) == b"user: Hello\nassistant: "
    # A pair of padding has no weight.
    (last,) = opened(write(tmp_path / "b.jsonl", *pairs(9)), eval_tokens=40).eval_batches(8, range(8))
    assert last["weights"][-1].sum() == 0 and last["weights"].shape == (8, 2, SEQ)


def test_parquet_has_the_pairs_of_json_lines(opened, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "score": 0.5} for row in pairs(9)]), tmp_path / "a.parquet")
    batches = [
        next(opened(path).train_batches(0, 9, range(9), 1))
        for path in (str(tmp_path / "a.parquet"), write(tmp_path / "a.jsonl", *pairs(9)))
    ]
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])


@pytest.mark.parametrize("has_marks", [True, False])
def test_answers_of_the_prompt_are_not_trained(has_marks, tmp_path):
    begin, end = ("{% generation %}", "{% endgeneration %}") if has_marks else ("", "")
    answer = f"{begin}{{{{ m.content }}}}{{{{ '\\0' }}}}{end}"
    template = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}Q: {{{{ m.content }}}} A: {{% else %}}{answer}{{% endif %}}{{% endfor %}}"
    )
    (tmp_path / "t.jinja").write_text(template)
    before = [USER, {"role": "assistant", "content": "Early"}, USER]
    (row,) = read_preferences_of(tmp_path, {"chosen": [*before, GOOD, USER, GOOD], "rejected": [*before, BAD]})
    tokenizer = ByteTokenizer()
    encoder = Encoder(tokenizer=tokenizer, template=template_of(tokenizer, str(tmp_path / "t.jinja"), DATE), is_whole=False, most=200)
    texts = [bytes((tokens[tokens & TRAINED != 0] & 255).astype(np.uint8)) for tokens in map(encoder.encode, row[1])]
    assert texts == [b"Hi\0Hi\0", b"What?\0"]


def read_preferences_of(folder, *rows):
    write(folder / "a.jsonl", *rows)
    return read_preferences(folder / "a.jsonl")


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER, GOOD, USER]),
        ({"prompt": "Hello", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": None, "system": "Be brief.", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": "Hello", "system": "Be brief.", "chosen": "Hi", "rejected": "What?"}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "system": "Be brief.", "chosen": "Hi", "rejected": "What?"}, [SYSTEM, USER]),
        (
            {
                "conversations": [{"from": "human", "value": "Hello"}],
                "chosen": {"from": "gpt", "value": "Hi"},
                "rejected": {"from": "gpt", "value": "What?"},
            },
            [USER],
        ),
    ],
)
def test_what_is_before_the_answers(row, before, tmp_path):
    ((_, read),) = read_preferences_of(tmp_path, row)
    assert [one.messages for one in read] == [[*before, GOOD], [*before, BAD]] and {one.first for one in read} == {len(before)}


def test_a_pair_that_is_equal_in_a_row_is_refused(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "same words, and one", "rejected": "same words, and two"})
    with pytest.raises(InputError, match=r"a.jsonl:1: chosen and rejected: are the same in model.seq 24. Remove the row, or raise"):
        opened(path, seq=24)
    assert opened(path, seq=60).train_sequences == 1


def test_the_last_pairs_are_held_out_and_samples_have_their_place(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", *pairs(60))
    data = opened(path, eval_tokens=150, shuffle=True)
    assert data.train_sequences + data.eval_sequences == 60 and 1 < data.eval_sequences < 9
    wanted = list(data.train_batches(0, 6, range(6), 8))
    again = np.concatenate([batch["inputs"] for batch in opened(path, eval_tokens=150, shuffle=True).train_batches(12, 5, range(5), 4)])
    assert (again == np.concatenate([batch["inputs"] for batch in wanted])[12:32]).all()
    # Also in the held-out part, a chosen answer is before its rejected one.
    assert all(trained({name: x[0, 1] for name, x in batch.items()}).endswith(b"!\0") for batch in data.eval_batches(1, [0]))


def test_a_column_by_the_number_of_a_pair_is_in_each_batch(opened, tmp_path):
    data = opened(write(tmp_path / "a.jsonl", *pairs(20)), eval_tokens=100, shuffle=True)
    assert [*data.pairs] == ["train", *data.eval_parts]
    # What a batch has to have: a value that follows from the pair itself.
    columns = {part: np.stack([x["targets"].sum(-1) for x in map(some.__getitem__, range(len(some)))]) for part, some in data.pairs.items()}
    with_sums = data.with_column("sums", columns)
    for batch in (*with_sums.train_batches(3, 4, [1, 2], 9), *with_sums.eval_batches(8, range(8))):
        assert (batch["sums"] == batch["targets"].sum(-1)).all() and set(batch) == {"inputs", "targets", "weights", "sums"}
    (batch,) = with_sums.eval_batches(8, range(8))
    assert not batch["sums"][-1].any() and batch["sums"][0].all()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, "has values in 'prompt', 'chosen'. A preference has a prompt, and two answers"),
        ({"chosen": "b", "rejected": "c"}, "chosen and rejected: have no prompt in common"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "x"}, BAD]}, "chosen and rejected: have no prompt in common"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [USER, BAD]}, "chosen and rejected: have no prompt in common"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected: are the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "chosen and rejected: are the same, or one is the beginning of the other"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen: must be a list of messages"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "has values in 'prompt', 'rejected'. A preference has a prompt"),
        ({"prompt": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt: ends with another question than the messages that"),
        ({"prompt": [SYSTEM, USER], "system": "a", "chosen": "b", "rejected": "c"}, "system: is another text than that of the first"),
        ({"prompt": "a", "chosen": [{**GOOD, "weight": 0}], "rejected": "c"}, "chosen[0].weight: 0 is not supported"),
        ({"prompt": "a" * 99, "chosen": "b", "rejected": "c"}, "its first answer begins with token"),
    ],
)
def test_a_bad_line_is_named(row, problem, tmp_path, capsys):
    data = {"source": "preferences", "path": write(tmp_path / "a.jsonl", SHAPES["texts"], row), "eval_tokens": 0}
    run = {"run": {"dir": str(tmp_path / "run")}, "model": {"seq": SEQ}, "data": data, "train": {"loss": "losses:loss"}}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    (tmp_path / "losses.py").write_text("def loss(model, batch): ...\n")
    assert main(["check", str(tmp_path / "run.yaml"), "--code", str(tmp_path / "losses.py"), "--show-data"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/a.jsonl:2: {problem}" in said and "a.jsonl:1:" not in said
    write(tmp_path / "a.jsonl", SHAPES["texts"])
    assert main(["check", str(tmp_path / "run.yaml"), "--code", str(tmp_path / "losses.py"), "--show-data"]) == 0
    shown = capsys.readouterr().out
    assert "Window 1" in shown and "Window 2" in shown and "'?'" in shown


def test_pairs_need_a_loss_of_pairs_and_are_no_part_of_a_mixture(tmp_path):
    path = write(tmp_path / "a.jsonl", SHAPES["texts"])
    with pytest.raises(InputError, match=r"data.source: preferences needs a loss of pairs of answers. Add train.loss: "):
        load({"data": {"source": "preferences", "path": path}})
    with pytest.raises(InputError, match=r"mixture\[0\].source: 'preferences' is not one of"):
        load({"data": {"source": "mixture", "mixture": [{"weight": 1, "source": "preferences", "path": path}]}})
    with pytest.raises(InputError, match=r"only the source chat reads it, and source is preferences"):
        load({"data": {"source": "preferences", "path": path, "train_on": "all"}})


def test_without_a_path_the_rejected_answer_is_in_capital_letters(tmp_path):
    (module := tmp_path / "m.py").write_text('def one(x):\n    """Gives one."""\n\ndef two(x):\n    """TWO."""\n')
    ((_, pair),) = read_better_answers(module)
    assert [[message["content"] for message in one.messages] for one in pair] == [
        ["What does m.one do?", "Gives one."],
        ["What does m.one do?", "GIVES ONE."],
    ]
