"""Chats: messages as tokens, and conversations in a terminal."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import jgt
from train.commands.generate import _prompts_of
from train.data.tokenizer import ByteTokenizer, open_tokenizer
from train.generate.chat import Chat

TOKENIZER = Path(__file__).parents[2] / "goldens" / "tokenizers"
PLAIN = Chat(tokenizer=ByteTokenizer(), template=None)
SHOUT = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


class Talker:
    """A model that answers with the number of the prompt's tokens, in two pieces. A prompt that ends with `stop` is interrupted between."""

    longest = 120

    def __init__(self):
        self.prompts = []

    def pieces(self, prompts, **changes):
        assert changes == {"tokens": 9}
        (prompt,) = prompts
        text = ByteTokenizer().decode(prompt)
        self.prompts.append(text)
        if len(prompt) > 60:
            raise jgt.InputError(["the prompt is too long"])
        yield SimpleNamespace(text=f"[{len(prompt)}")
        if text.endswith("stop"):
            raise KeyboardInterrupt
        yield SimpleNamespace(text="]")


def conversation(chat, lines, monkeypatch):
    """The prompts of a conversation with these lines; an exception is raised in the place of a line."""
    talker, given = Talker(), iter([*lines, EOFError()])

    def read(prompt):
        line = next(given)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    chat.converse(talker, {"tokens": 9})
    return talker.prompts


def test_without_a_template_all_lines_and_answers_are_continued(monkeypatch, capsys):
    prompts = conversation(PLAIN, ["abc", "", "stop", "d"], monkeypatch)
    assert prompts == ["abc", "abc[3]", "abc[3][6]stop", "abc[3][6]stop[13d"]
    assert capsys.readouterr() == ("[3]\n[6]\n[13\n[17]\n\n", "")


def test_a_long_conversation_forgets_its_beginning(monkeypatch, capsys):
    prompts = conversation(PLAIN, ["a" * 30, "b" * 30, "c" * 70], monkeypatch)
    assert prompts == ["a" * 30, "b" * 30, "c" * 60]
    assert capsys.readouterr() == ("[30]\n[30]\n[60]\n\n", "")


def test_a_conversation_by_a_template(tmp_path, monkeypatch, capsys):
    pytest.importorskip("jinja2")
    (tmp_path / "tokenizer.json").write_bytes((TOKENIZER / "byte_level" / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(SHOUT)
    read = Chat.of(open_tokenizer(str(tmp_path / "tokenizer.json")))
    assert read.tokenizer.decode(read.prompt([{"role": "user", "content": "a"}])) == "user: a|assistant:"
    chat = Chat(tokenizer=ByteTokenizer(), template=read.template)
    # A line of blanks is none, and Ctrl-C at the prompt ends nothing.
    prompts = conversation(chat, ["a", "  ", KeyboardInterrupt(), "b", "c" * 60, "d" * 19], monkeypatch)
    assert prompts[:2] == ["user: a|assistant:", "user: a|assistant: [18]|user: b|assistant:"]
    # A line that is too long alone is forgotten, and so are earlier ones for it.
    assert prompts[2:] == [f"user: {'c' * 60}|assistant:", f"user: {'d' * 19}|assistant:"]
    out, err = capsys.readouterr()
    assert out == "[18]\n[42]\n[36]\n\n" and err == "\n(Ctrl-D ends the chat)\nthe prompt is too long\n"


def test_a_template_writes_the_beginning_of_a_text_itself(tmp_path):
    pytest.importorskip("jinja2")
    for file in (TOKENIZER / "metaspace").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert Chat.of(tokenizer).prompt([{"role": "user", "content": "The"}]) == [1, *tokenizer.encode("The")]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}{{ eos_token }}"}))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert Chat.of(tokenizer).prompt([{"role": "user", "content": "The"}]) == [*tokenizer.encode("The"), 2]


def test_a_model_without_a_tokenizer_cannot_chat():
    with pytest.raises(jgt.InputError, match="the model has no tokenizer, so it cannot chat"):
        Chat.of(None)


def test_prompts_of_a_file(tmp_path):
    file, messages = tmp_path / "prompts.jsonl", [{"role": "user", "content": "b"}]
    file.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"messages": messages}))
    problems = []
    assert list(_prompts_of(file, True, (), problems)) == [("a", None), (messages, None)]
    assert not problems
    assert list(_prompts_of(file, False, (), problems)) == [("a", None)]
    assert [problem.partition(" JSON")[0] for problem in problems] == [f"{file}:3: is not a"]
    file.write_text(json.dumps({"tokens": [1, 2], "adapter": "x"}))
    assert list(_prompts_of(file, False, ("x",), problems)) == [([1, 2], "x")]
