"""Conversations as training data: the shapes of files, rows of whole conversations, and input that is refused."""

import datetime
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jgt import InputError
from jgt.command.commands import main

pytest.importorskip("jinja2")
from train.data.chat.rows import packed
from train.data.config import DataConfig, MixturePart
from train.data.opening import open_data
from train.data.tokenizer import ByteTokenizer
from train.generate.chat import Chat
from train.models.config import ModelConfig
from train.models.decoder import build
from train.run.directory.history import begin_folder
from train.run.train import train
from train.step.loss import make_loss
from train.weights.origin import keep_origin, origin_files
from train.weights.writing import write_folder

GOLDENS = Path(__file__).parents[2] / "goldens" / "tokenizers"
SEQ = 40
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
TEXT = b"user: Hello\nassistant: Hi\0\n"
TEMPLATE = (
    """{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{{ '\\0' }}{% endfor %}{{ '' if tools is none else tools }}"""
)


def write(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def chats(count, longest=12, seed=0):
    """Conversations of one to three questions with answers of up to so many letters."""
    random = np.random.default_rng(seed)

    def text():
        return "".join(random.choice([*"abcdefg"], random.integers(1, longest)))

    turns = [[("user", text()), ("assistant", text())] * random.integers(1, 4) for _ in range(count)]
    return [{"messages": [{"role": role, "content": content} for role, content in some]} for some in turns]


@pytest.fixture
def opened(tmp_path):
    def _opened(seq=SEQ, seed=0, **keys):
        config = DataConfig(**{"source": "chat", "eval_tokens": 0, "shuffle": False, **keys})
        return open_data(config, seq=seq, vocab=256, seed=seed, cache_dir=tmp_path / "cache")

    return _opened


@pytest.fixture
def whole(opened):
    """Opens a file of conversations, and returns each row's text and the trained parts of it."""

    def _whole(path, **keys):
        data = opened(path=path, packing=False, **keys)
        (batch,) = data.train_batches(0, data.train_sequences, range(data.train_sequences), 1)
        texts = []
        for inputs, targets, weights in zip(batch["inputs"], batch["targets"], batch["weights"], strict=True):
            ids = [inputs[0], *targets]
            texts.append((bytes(ids), bytes(int(token) for token, weight in zip(targets, weights, strict=True) if weight)))
        return texts

    return _whole


# -- shapes ------------------------------------------------------------------------------------------------------


def test_the_keys_of_each_line_say_its_shape(whole, tmp_path):
    rows = [
        {"messages": MESSAGES, "id": 3},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"conversations": MESSAGES},
        {"instruction": "Hello", "input": "", "output": "Hi"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, MESSAGES[1]]},
        # Marks that say what is done anyway.
        {"conversations": [{"from": "human", "value": "Hello", "weight": 0.0}, {"from": "gpt", "value": "Hi", "weight": 1.0}]},
        {"messages": [{**MESSAGES[0], "train": False, "weight": 1}, {**MESSAGES[1], "train": True}], "loss_mask": None},
        # As tables have them: the keys of all shapes, with nothing in those of the others.
        {"messages": None, "conversations": MESSAGES, "instruction": None, "output": None, "tools": "", "system": " ", "images": []},
        {"messages": [], "conversations": None, "instruction": "Hello", "input": None, "output": "Hi", "history": []},
        {"messages": MESSAGES, "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    ]
    for text, trained in whole(write(tmp_path / "a.jsonl", *rows)):
        assert text.rstrip(b"\0") == TEXT and trained == b"Hi\0"


def test_system_turns_tools_and_calls_reach_the_template(whole, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    call = [{"function": {"name": "f", "arguments": {"x": 0}}}]
    rows = [
        {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": call}], "tools": [{"n": 1}]},
        {"messages": [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": call}], "tools": '[{"n": 1}]'},
        {"system": "S", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"system": "S", "instruction": "Q", "input": "more", "output": "A"},
        {"system": "S", "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"system": "S", "messages": [{"role": r, "content": c} for r, c in [("system", "S"), ("user", "Q"), ("assistant", "A")]]},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    found = [text.rstrip(b"\0").decode() for text, _ in whole(path, template=str(tmp_path / "t.jinja"), seq=120, train_on="all")]
    calls = "[{'function': {'name': 'f', 'arguments': {'x': 0}}}]"
    assert found == [
        f"<user>Hello\0<assistant>{calls}\0[{{'n': 1}}]",
        f"<user>Hello\0<assistant>{calls}\0[{{'n': 1}}]",
        "<system>S\0<user>Q\0<assistant>A",
        "<system>S\0<user>Q\n\nmore\0<assistant>A",
        "<system>S\0<user>Q\0<assistant>A",
        "<system>S\0<user>Q\0<assistant>A",
    ]


def test_whatever_a_message_says_reaches_the_template(whole, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m | tojson(sort_keys=true) }}\0{% endfor %}{{ tools | tojson }}")
    call, told = {"name": "f", "arguments": {"x": [1], "y": None}}, {"name": "f", "parameters": {"type": "object"}}
    rows = [
        [
            {"from": "human", "value": "Q", "name": "n"},
            {"from": "gpt", "value": None, "tool_calls": [{"id": "1", "function": {**call, "arguments": json.dumps(call["arguments"])}}]},
            {"from": "observation", "value": "R", "tool_call_id": "1"},
            {"from": "gpt", "value": "A", "reasoning_content": "T", "name": None},
        ],
        [
            {"role": "user", "content": "Q", "name": "n"},
            {"role": "assistant", "tool_calls": [json.dumps({"id": "1", "function": call})]},
            {"role": "tool", "content": "R", "tool_call_id": "1"},
            {"role": "assistant", "content": "A", "reasoning_content": "T", "thinking": None},
        ],
    ]
    tools = [json.dumps([{"type": "function", "function": told}]), [{"type": "function", "function": json.dumps(told)}]]
    tools += [[json.dumps({"type": "function", "function": {**told, "parameters": '{"type": "object"}'}})]]
    written = (
        '{"content": "Q", "name": "n", "role": "user"}\0'
        '{"role": "assistant", "tool_calls": [{"function": {"arguments": {"x": [1], "y": null}, "name": "f"}, "id": "1"}]}\0'
        '{"content": "R", "role": "tool", "tool_call_id": "1"}\0'
        '{"content": "A", "reasoning_content": "T", "role": "assistant", "thinking": "T"}\0'
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    )
    lines = [{"conversations": turns, "tools": tool} for turns in rows for tool in tools]
    found = whole(write(tmp_path / "a.jsonl", *lines), template=str(tmp_path / "t.jinja"), seq=600, train_on="all")
    assert [text.rstrip(b"\0").decode() for text, _ in found] == [written] * 6


def test_a_file_may_be_one_array_and_have_a_mark_of_its_encoding(whole, tmp_path):
    rows = [{"messages": MESSAGES}, {"instruction": "Hello", "output": "Hi"}]
    wanted = whole(write(tmp_path / "a.jsonl", *rows))
    for name, text in {"b.json": json.dumps(rows, indent=1), "c.json": "\ufeff" + json.dumps(rows)}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert whole(str(tmp_path / name)) == wanted
    (tmp_path / "d.jsonl").write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert whole(str(tmp_path / "d.jsonl")) == wanted
    (tmp_path / "e.json").write_text(json.dumps([*rows, 3, {"messages": [Q]}]))
    with pytest.raises(InputError, match=r"(?s)e.json: item 2: must be a JSON object, not .*e.json: item 3: has no answer"):
        whole(str(tmp_path / "e.json"))
    (tmp_path / "f.json").write_text(json.dumps(rows)[:-1])
    with pytest.raises(InputError, match=r"f.json: not valid JSON: .* or one array of them"):
        whole(str(tmp_path / "f.json"))
    with pytest.raises(InputError, match=r"g.jsonl:1: must be a JSON object, not a list"):
        whole(write(tmp_path / "g.jsonl", rows))


def test_parquet_has_the_conversations_of_json_lines(whole, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    # In a column, the message without calls has a null.
    arguments = [{"x": 1, "y": None}, {"x": None, "y": 2}]
    called = {"role": "assistant", "content": "Hm", "tool_calls": [{"function": {"name": "f", "arguments": one}} for one in arguments]}
    rows = [{"messages": [*MESSAGES, MESSAGES[0], called]}, {"messages": [{**MESSAGES[0], "tool_calls": None}, MESSAGES[1]]}]
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "n": 1} for row in rows]), tmp_path / "a.parquet")
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    keys = {"template": str(tmp_path / "t.jinja"), "seq": 300}
    assert whole(str(tmp_path / "a.parquet"), **keys) == whole(write(tmp_path / "a.jsonl", *rows), **keys)
    dated = [{**row, "tools": [{"name": "f", "parameters": {"since": datetime.date(2024, 7, 26)}}]} for row in rows[:1]]
    parquet.write_table(pyarrow.Table.from_pylist(dated), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c.parquet: row 1: tools: Object of type date is not JSON serializable. Write such values as"):
        whole(str(tmp_path / "c.parquet"), **keys)
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet: has the columns 'text', and none of messages, conversations"):
        whole(str(tmp_path / "b.parquet"))


def test_without_a_path_they_are_about_the_standard_library(opened):
    data = opened(path=None, seq=256)
    assert data.train_sequences > 100 and re.search(r"^chat: [\d,]+ conversations in [\d,]+ rows of 256 tokens, 9\d", data.notes[0])


# -- rows --------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_into_the_first_row_with_room():
    random = np.random.default_rng(0)
    lengths, rows = random.integers(1, 65, 3000), []
    for length in lengths:
        # No row is so old that it is closed.
        at = next((n for n, used in enumerate(rows) if used + length <= 256), len(rows))
        rows[at : at + 1] = [(rows[at] if at < len(rows) else 0) + length]
    found = packed(lengths, 256)
    assert np.bincount(found, lengths).tolist() == rows
    assert lengths.sum() / (256 * len(rows)) > 0.97


def test_rows_have_whole_conversations_each_with_its_own_positions(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", *chats(60))
    alone, rows = opened(path=path, packing=False, seq=150), opened(path=path, seq=150)
    (one,) = alone.train_batches(0, 60, range(60), 1)
    count = rows.train_sequences
    (batch,) = rows.train_batches(0, count, range(count), 1)
    assert 2 * count < 60 and "segments" not in one

    def parts(batch, segments):
        """The tokens and weights of each conversation."""
        found = []
        for tokens, targets, weights, places in zip(batch["inputs"], batch["targets"], batch["weights"], segments, strict=True):
            for begin in np.unique(places):
                at = np.flatnonzero(places == begin)
                assert at[0] == begin and (np.diff(at) == 1).all()
                trained = np.flatnonzero(weights[at])
                if len(trained):
                    found.append((tokens[at][: trained[-1] + 1].tobytes(), targets[at][trained].tobytes()))
        return sorted(found)

    wanted = parts(one, np.zeros_like(one["inputs"]))
    assert parts(batch, batch["segments"]) == wanted and len(wanted) == 60
    assert batch["weights"].sum() == one["weights"].sum()


def test_the_loss_of_packed_rows_is_the_mean_over_the_same_tokens(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", *chats(40, longest=20))
    model = build(ModelConfig(layers=1, embed=16, heads=2, kv_heads=2, ffn=32, vocab=256, seq=160))
    params, variables = model.init(jax.random.key(0))
    of_module = make_loss(lambda module, x, **more: module.features(x, **more))
    losses = []
    for packing in (True, False):
        data = opened(path=path, packing=packing, seq=160)
        (batch,) = data.train_batches(0, data.train_sequences, range(data.train_sequences), 1)
        batch = {**batch, "weights": batch["weights"] / batch["weights"].sum()}

        def loss(params, batch):
            return model.run(lambda module: of_module(module, batch), params, variables, True)[0]

        losses.append(float(jax.jit(loss)(params, batch)))
    assert abs(losses[0] - losses[1]) < 1e-6


def test_a_sample_is_the_same_one_in_every_batch_and_after_every_start(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", *chats(200))
    keys = {"path": path, "shuffle": True, "seed": 3}
    wanted = list(opened(**keys).train_batches(0, 6, range(6), 20))
    again = opened(**keys)
    # A process reads its own rows, and a run starts after some samples with another batch.
    for first, other in zip(wanted, again.train_batches(0, 6, [4, 1], 20), strict=True):
        assert all((first[name][[4, 1]] == other[name]).all() for name in first)
    late = np.concatenate([batch["inputs"] for batch in again.train_batches(30, 5, range(5), 3)])
    assert (late == np.concatenate([batch["inputs"] for batch in wanted])[30:45]).all()
    assert not (late == next(opened(**{**keys, "seed": 4}).train_batches(30, 15, range(15), 1))["inputs"]).all()


def test_the_fingerprint_knows_data_and_template(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", *chats(9))
    first = opened(path=path).fingerprint
    assert opened(path=path, packing=False).fingerprint == first
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("tool_calls", "calls"))
    assert opened(path=path, template=str(tmp_path / "t.jinja"), seq=120).fingerprint["template_sha256"] != first["template_sha256"]
    write(tmp_path / "a.jsonl", *chats(9, seed=1))
    assert opened(path=path).fingerprint["ends_crc32"] != first["ends_crc32"]


def test_the_last_conversations_are_held_out(opened, tmp_path):
    path = write(tmp_path / "a.jsonl", *chats(100))
    every, some = opened(path=path).fingerprint["train_tokens"], opened(path=path, eval_tokens=200)
    assert some.fingerprint["train_tokens"] + some.fingerprint["eval_tokens"] == every
    assert 200 <= some.fingerprint["eval_tokens"] < 300
    (held_out,) = some.eval_batches(some.eval_sequences, range(some.eval_sequences))
    # Whole ones: the first of them begins as every conversation does.
    assert bytes(held_out["inputs"][0][:6].tolist()) == b"user: "
    assert 0 < opened(path=path, eval_tokens=None).fingerprint["eval_tokens"] < every / 10
    assert opened(path=write(tmp_path / "b.jsonl", *chats(1)), eval_tokens=None).eval_sequences == 0
    with pytest.raises(InputError, match=r"eval_tokens: all conversations of .* would be held out"):
        opened(path=path, eval_tokens=every)
    other = opened(path=path, eval_path=write(tmp_path / "c.jsonl", *chats(3)), eval_tokens=None)
    assert other.fingerprint["train_tokens"] == every and other.eval_sequences and len(other.notes) == 2


@pytest.mark.parametrize("documents", ["join", "mask"])
def test_a_mixture_of_conversations_and_documents(documents, opened, tmp_path):
    texts = write(tmp_path / "t.jsonl", *({"text": f"document {n} " * 3} for n in range(50)))
    parts = [
        MixturePart(weight=1.0, source="chat", path=write(tmp_path / "a.jsonl", *chats(50))),
        MixturePart(weight=1.0, source="jsonl", path=texts),
    ]
    mixed = opened(source="mixture", mixture=tuple(parts), documents=documents)
    alone = opened(source="jsonl", path=texts, documents=documents)
    batch, windows = next(mixed.train_batches(0, 20, range(20), 1)), next(alone.train_batches(0, 10, range(10), 1))
    # A window is trained as it is without conversations beside it.
    at = [n for n in range(20) if bytes(batch["inputs"][n][:6].tolist()) != b"user: "]
    assert len(at) == 10
    for name in windows:
        assert (batch[name][at] == windows[name]).all(), name
    if documents == "join":
        assert not batch["segments"][at].any()


def test_tokens_outside_of_the_vocabulary_are_named(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [MESSAGES[0], {"role": "assistant", "content": "zzz"}]})
    with pytest.raises(InputError, match=r"is 122, but the vocabulary has 122 ids .* Set model.vocab=256"):
        open_data(DataConfig(source="chat", path=path), seq=SEQ, vocab=122, seed=0, cache_dir=tmp_path / "cache")


# -- input that is refused ---------------------------------------------------------------------------------------


def one(*messages, **more):
    return {"messages": [*messages], **more}


Q, A = MESSAGES
SHAPES = "A conversation is one of {messages: [{role, content}, ..]}, {conversations: [{from, value}, ..]}, {instruction, input, output}"
LINES = {
    "no_json": ('{"messages": [', "not valid JSON"),
    "a_list": ([Q, A], "must be a JSON object, not a list"),
    "preferences": (
        {"chosen": "b", "rejected": "c"},
        f"has values in 'chosen', 'rejected'. {SHAPES}. Pairs of answers have the source preferences",
    ),
    "other_keys": ({"prompt": "a", "answer": "b"}, "has values in 'prompt', 'answer'. A conversation is one of {messages: "),
    "no_list": ({"messages": "Hello"}, "messages: must be a list of messages"),
    "no_messages": ({"messages": [], "tools": "", "id": 3}, "has values in 'id'. A conversation is one of"),
    "a_text_as_message": (one("Hello"), "messages[0]: must be a message with a role"),
    "no_role": (one(Q, {"content": "Hi"}), "messages[1]: must be a message with a role"),
    "unknown_role": (one(Q, {"role": "asistant", "content": "Hi"}), "messages[1].role: 'asistant' is not known. Did you mean 'assistant'?"),
    "unknown_sender": ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0].from: 'bot' is not known"),
    "a_list_as_sender": ({"conversations": [{"from": ["gpt"], "value": "a"}]}, "conversations[0].from: ['gpt'] is not known"),
    "no_answer": (one(Q), "has no answer, which is a message of the assistant"),
    "an_empty_answer": (one(Q, {"role": "assistant", "content": " "}), "messages[1].content: is empty"),
    "an_empty_question": (one({"role": "user", "content": ""}, A), "messages[0].content: is empty"),
    "a_number_as_content": (one(Q, {"role": "assistant", "content": 3}), "messages[1].content: must be a text"),
    "an_image": (one({"role": "user", "content": [{"type": "image"}]}, A), "messages[0].content: must be a text or a list"),
    "tools_that_are_none": (one(Q, A, tools="{"), "tools: must be a list, or its JSON, not '{'"),
    "a_weight": (one(Q, {**A, "weight": 0}), "messages[1].weight: 0 is not supported"),
    "a_sender_with_a_weight": ({"conversations": [{"from": "gpt", "value": "a", "weight": 0}]}, "conversations[0].weight: 0 is not"),
    "a_mark": (one(Q, {**A, "training": False, "loss": False}), "messages[1].training: false is not supported"),
    "a_mark_of_a_question": (one({**Q, "train": True}, A), "messages[0].train: true is not supported"),
    "a_mask": (one(Q, A, loss_mask=[0, 0]), "loss_mask: is not supported"),
    "earlier_turns": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history: is not supported. Write it as messages"),
    "images": (one(Q, A, images=["a.png"]), "images: is not supported"),
    "settings_of_the_template": (one(Q, A, chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs: is not supported"),
    "two_conversations": ({"messages": [Q, A], "conversations": [Q, {**A, "content": "b"}]}, "messages and conversations: are different"),
    "two_systems": (one({"role": "system", "content": "a"}, Q, A, system="b"), "system: is another text than that of the first message"),
    "two_names_of_a_role": ({"conversations": [{"from": "gpt", "role": "user", "value": "a"}]}, "conversations[0]: must be a message with"),
    "arguments_cut_short": (
        one(Q, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}),
        "messages[1].tool_calls[0].function.arguments: must be a mapping, or its JSON, not '{'",
    ),
    "half_a_character_in_arguments": (
        one(Q, {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"x": "\\ud800"}'}}]}),
        "messages[1].tool_calls[0].function.arguments: must be a mapping, or its JSON, not ",
    ),
    "a_tool_that_is_a_name": (one(Q, A, tools=["f"]), "tools[0]: must be a mapping, or its JSON, not 'f'"),
    "half_a_character": (one(Q, {"role": "assistant", "content": "\ud800"}), "contains half of a surrogate pair"),
    "a_long_question": (one({"role": "user", "content": "a" * 99}, A), "its first answer begins with token"),
    "no_alpaca": ({"instruction": 3, "output": "a"}, "instruction: must be a list of messages"),
}


@pytest.fixture
def checked(tmp_path, capsys):
    """Runs `jgt check --show-data`, and returns its exit code and what it says on stderr."""

    def _checked(*lines, **keys):
        data = {"source": "chat", "path": write(tmp_path / "a.jsonl", *lines), "eval_tokens": 0, **keys}
        run = {"run": {"dir": str(tmp_path / "run")}, "model": {"seq": 64}, "data": data}
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        code = main(["check", str(tmp_path / "run.yaml"), "--show-data"])
        return code, capsys.readouterr()

    return _checked


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named(name, checked, tmp_path):
    line, problem = LINES[name]
    code, said = checked({"messages": MESSAGES}, line)
    assert code == 2 and f"{tmp_path}/run.yaml:1: {tmp_path}/a.jsonl:2: {problem}" in said.err and "jsonl:1:" not in said.err


def test_equal_problems_are_said_once(checked):
    code, said = checked(*[one(Q)] * 5, one(Q, {**A, "content": ""}))
    assert code == 2 and said.err.count("\n") == 2
    assert "a.jsonl:1: has no answer" in said.err and "(and 4 more have this problem)" in said.err and "a.jsonl:6: " in said.err


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"template": "absent.jinja"}, "data.template: absent.jinja cannot be read: No such file or directory. Write auto, or"),
        ({"template": "{folder}/bad.jinja"}, "bad.jinja: chat_template: line 1: "),
        ({"tokenizer": "{tokens}"}, "tokenizer.json: has no chat template beside it: no chat_template.jinja, "),
        ({"template": "{folder}/raises.jinja"}, "a.jsonl:1: {folder}/raises.jinja: the chat template cannot write these messages: Never"),
        ({"template": "{folder}/no_end.jinja"}, "a.jsonl:1: messages[1]: the chat template {folder}/no_end.jinja writes"),
        ({"source": "jsonl", "train_on": "all", "path": "{folder}/a.jsonl"}, "only the source chat reads it, and source is jsonl"),
        ({"documents": "mask"}, "conversations, which never attend to each other. Remove the key"),
        ({"path": "absent.jsonl"}, "no such file or folder: absent.jsonl"),
        ({"eval_tokens": 10**6}, "would be held out"),
    ],
)
def test_bad_keys_are_named(keys, problem, checked, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    (tmp_path / "raises.jinja").write_text("{{ raise_exception('Never') }}")
    (tmp_path / "no_end.jinja").write_text("{{ messages | length }}")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text((GOLDENS / "byte_level" / "tokenizer.json").read_text())
    names = {"folder": tmp_path, "tokens": tmp_path / "tokens" / "tokenizer.json"}
    filled = {key: value.format(**names) if isinstance(value, str) else value for key, value in keys.items()}
    code, said = checked({"messages": MESSAGES}, **filled)
    assert code == 2 and problem.format(**names) in said.err and "run.yaml:1: " in said.err


# -- runs --------------------------------------------------------------------------------------------------------


def test_what_is_trained_is_shown(checked):
    code, said = checked({"messages": MESSAGES})
    assert code == 0 and "1 conversations in 1 rows of 64 tokens" in said.out
    shown = re.findall(r"^\d+ +\d+ +'(.*)' +([01]) +(\d)$", said.out, re.MULTILINE)
    assert [text for text, weight, _ in shown if weight == "1"] == ["H", "i", r"\x00"] and shown[-1][2] == "2"


@pytest.mark.slow
def test_a_run_on_packed_rows_evaluates_as_one_on_padded_rows(tiny, tmp_path, read_rows):
    path = write(tmp_path / "a.jsonl", *chats(80))
    losses = []
    for packing in ("true", "false"):
        more = ["train.steps=1", "optimizer.lr=1e-12", "model.seq=128", f"run.dir={tmp_path / packing}"]
        train(tiny(f"data={{source: chat, path: {path}, eval_tokens: 600, packing: {packing}}}", *more))
        losses += [row["eval_loss"] for row in read_rows(tmp_path / packing / "metrics.jsonl") if "eval_loss" in row]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_chats_and_exports_of_a_run_have_the_template_of_its_data(tiny, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    path = write(tmp_path / "a.jsonl", *chats(9))
    run = tiny(f"data={{source: chat, path: {path}, template: {tmp_path / 't.jinja'}}}")
    assert bytes(Chat.of(ByteTokenizer(), run.config.data).prompt([Q])) == b"<Hello>"
    assert bytes(Chat.of(ByteTokenizer(), tiny("data={source: chat}").config.data).prompt([Q])) == b"user: Hello\nassistant: "
    assert Chat.of(ByteTokenizer(), tiny().config.data).template is None
    begin_folder(run, {})
    assert (tmp_path / "run" / "origin" / "chat_template.jinja").read_text() == (tmp_path / "t.jinja").read_text()


def test_templates_with_names_are_kept_and_exported(tmp_path):
    folder = tmp_path / "model"
    for made in (folder / "additional_chat_templates", tmp_path / "run", tmp_path / "other"):
        made.mkdir(parents=True)
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/rag.jinja",
    ):
        (folder / name).write_text(name)
    templates = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.jinja")}
    keep_origin(tmp_path / "run", None, str(folder / "tokenizer.json"))
    kept = tmp_path / "run" / "origin"
    assert {str(file.relative_to(kept)): file.read_text() for file in kept.rglob("*.jinja")} == templates and len(templates) == 3
    write_folder(tmp_path / "exported", {}, iter(()), files=origin_files(kept), max_file_bytes=1)
    assert {str(file.relative_to(tmp_path / "exported")) for file in (tmp_path / "exported").rglob("*.jinja")} == {*templates}
    # A template of the data's own goes before all of them.
    keep_origin(tmp_path / "other", None, str(folder / "tokenizer.json"), str(folder / "additional_chat_templates" / "rag.jinja"))
    kept = tmp_path / "other" / "origin"
    assert {str(file.relative_to(kept)): file.read_text() for file in kept.rglob("*.jinja")} == {
        "chat_template.jinja": "additional_chat_templates/rag.jinja"
    }


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_and_refuses_another_template(tiny, tmp_path, stopped_at, read_rows):
    path = write(tmp_path / "a.jsonl", *chats(80))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}\0{% endgeneration %}{% endfor %}"
    )

    def run(name):
        data = f"data={{source: chat, path: {path}, template: {tmp_path / 't.jinja'}, train_on: all}}"
        return tiny(data, f"run.dir={tmp_path / name}", "model.seq=128", "train.steps=8", "checkpoint.every=3")

    train(run("straight"))
    with stopped_at(5):
        train(run("broken"))
    train(run("broken"))
    losses = [[row["loss"] for row in read_rows(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("straight", "broken")]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match=r"is not the data that .* was started with"):
        train(run("broken"))
