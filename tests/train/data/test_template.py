"""Chat templates: the texts of transformers (tests/goldens/chat_templates.json), and broken templates."""

import json
from pathlib import Path

import pytest

import jgt
from train.data.chat.template import ChatTemplate

pytest.importorskip("jinja2")
GOLDEN = json.loads((Path(__file__).parents[2] / "goldens" / "chat_templates.json").read_text())
TEXTS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]


def template(folder, text):
    (folder / "chat_template.jinja").write_text(text)
    return ChatTemplate.read(folder / "chat_template.jinja", TEXTS)


@pytest.mark.parametrize("name", GOLDEN["templates"])
def test_texts_are_those_of_transformers(name, tmp_path):
    made = template(tmp_path, GOLDEN["templates"][name])
    found = [row for row in GOLDEN["rows"] if row["template"] == name]
    assert len(found) == 2 * len(GOLDEN["chats"])
    for row in found:
        chat = GOLDEN["chats"][row["chat"]]
        if row["text"] is None:
            with pytest.raises(jgt.InputError, match=r"the chat template cannot write these messages: \w"):
                made.render(chat, add_generation_prompt=row["prompts"])
        else:
            assert made.render(chat, add_generation_prompt=row["prompts"]) == row["text"]


def test_a_key_without_a_value_is_not_there(tmp_path):
    made = template(tmp_path, "{{ messages[0].content }}{{ messages[0].tool_calls is defined }}{{ strftime_now('%Y') | length }}")
    assert made.render([{"role": "user", "content": "a", "tool_calls": None}]) == "aFalse4"


@pytest.mark.parametrize(
    "contents",
    [{"chat_template": "a{{ bos_token }}"}, {"chat_template": [{"name": "x", "template": ""}, {"name": "default", "template": "a<s>"}]}],
)
def test_a_template_in_json(contents, tmp_path):
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(contents))
    assert ChatTemplate.read(file, TEXTS).render(HELLO) == "a<s>"


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ('{"chat_template": "a\\n{% if %}"}', "chat_template: line 2: "),
        ('{"chat_template": 3}', "must be a template as text"),
        ('{"chat_template": [{"name": "x", "template": ""}]}', "of which one is named default"),
        ('{"chat_template": [3]}', "must be a template as text"),
        ("[", "must be a template as text"),
        ("[" * 100_000, "must be a template as text"),
    ],
)
def test_what_is_no_template(contents, problem, tmp_path):
    file = tmp_path / "tokenizer_config.json"
    file.write_text(contents)
    with pytest.raises(jgt.InputError, match=f"tokenizer_config.json: .*{problem}"):
        ChatTemplate.read(file, TEXTS)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__.os }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ '0123456789' * 10 }}{% endfor %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% include 'a' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox(text, tmp_path):
    with pytest.raises(jgt.InputError, match="the chat template cannot write these messages: "):
        template(tmp_path, text).render(HELLO)
