"""Which tokens of a conversation are trained: those of transformers, and no mask at all where none is sound."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jgt import InputError

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
from make_chats import CHATML, CHATS, STYLES, folder_of, without_marks

from train.data.chat.answers import BEGIN, CUT, ENDLESS, IDS, TRAINED, Encoder
from train.data.chat.messages import Conversation
from train.data.chat.rows import ChatRows
from train.data.chat.source import DATE, template_of
from train.data.stream import Segment, Stream
from train.data.tokenizer import ByteTokenizer, open_tokenizer

GOLDEN = json.loads((Path(__file__).parents[2] / "goldens" / "chats.json").read_text())
# These rewrite what comes before: Qwen 3's drops thoughts, and Phi 3's ends with a token that only the last answer has.
REWRITING = {"qwen3", "phi3"}
TURNS = [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]


@pytest.fixture
def encoder(tmp_path):
    """Makes the encoder of a template beside a tokenizer with special tokens."""

    def _encoder(template, style=CHATML, **keys):
        tokenizer = open_tokenizer(str(folder_of(style, tmp_path / "tokenizer", template)))
        return Encoder(tokenizer=tokenizer, template=template_of(tokenizer, "auto", DATE), **{"is_whole": False, "most": 10_000, **keys})

    return _encoder


def encoded(encoder, chat):
    """The ids and the mask of a chat."""
    tokens = encoder.encode(Conversation(messages=chat["messages"], tools=chat.get("tools")))
    return (tokens & IDS).tolist(), (tokens & TRAINED != 0).astype(int).tolist()


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("has_marks", [True, False])
def test_tokens_and_masks_are_those_of_transformers(name, has_marks, encoder):
    style, template = STYLES[name]
    made = encoder(template if has_marks else without_marks(template), style)
    assert made.template.has_marks == has_marks
    for chat, row in zip(CHATS, GOLDEN[name], strict=True):
        if row is None:
            with pytest.raises(InputError, match="the chat template cannot write these messages"):
                encoded(made, chat)
        elif has_marks or name not in REWRITING:
            assert encoded(made, chat) == (row["ids"], row["mask"])
            assert 0 < sum(row["mask"]) < len(row["ids"])
        elif len(chat["messages"]) > 2:
            with pytest.raises(InputError, match=r"in another way in the whole conversation, so nothing says which tokens to train. Mark"):
                encoded(made, chat)
        else:
            assert encoded(made, chat)[0] == row["ids"]


@pytest.mark.parametrize("name", STYLES)
def test_the_first_token_of_an_answer_and_its_end_are_trained(name, encoder):
    style, template = STYLES[name]
    made = encoder(template, style)
    ids, mask = encoded(made, {"messages": MESSAGES})
    ends = [n for n, trained in enumerate(mask) if trained and not [*mask, 0][n + 1]]
    begins = [n for n, trained in enumerate(mask) if trained and not mask[n - 1]]
    assert len(begins) == len(ends) == 2
    answers = [made.tokenizer.decode(ids[first : last + 1]) for first, last in zip(begins, ends, strict=True)]
    assert all(ids[n] in made.tokenizer.special_ids for n in ends)
    assert [answer.strip()[0] for answer in answers] == (["b", "<"] if name == "qwen3" else ["b", "d"])


def chatml(answer="{{ m.content }}<|im_end|>", *, head="", foot="", prompt="<|im_start|>assistant\n", turn=("", "")):
    """A template in the style of ChatML with something else in one place."""
    written = f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content }}}}<|im_end|>{{% endif %}}"
    body = f"{{% for m in messages %}}{turn[0]}<|im_start|>{{{{ m.role }}}}\n{written}{turn[1]}{{{{ '\n' }}}}{{% endfor %}}"
    return f"{head}{body}{foot}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


OTHER_WAY = "in another way in the whole conversation"
ANSWER = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
UNSOUND = {
    "an_end_after_the_last_answer_alone": (chatml("{{ m.content }}", foot="<|im_end|>"), OTHER_WAY),
    "earlier_answers_are_cut": (chatml("{{ m.content if loop.last else m.content[:0] }}<|im_end|>"), OTHER_WAY),
    "the_last_turn_in_another_way": (chatml("{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>"), OTHER_WAY),
    "the_number_of_turns_in_front": (chatml(head="{{ messages | length }} messages\n"), OTHER_WAY),
    "the_last_message_in_front": (chatml(head="{{ messages[-1].content }}\n"), OTHER_WAY),
    "newest_message_first": (chatml().replace("in messages", "in messages | reverse"), OTHER_WAY),
    "only_the_last_two_messages": (chatml().replace("in messages", "in messages[-2:]"), OTHER_WAY),
    "a_prompt_that_no_answer_follows": (chatml(prompt="<|im_start|>assistant\n<think>\n"), OTHER_WAY),
    "a_prompt_of_another_role": (chatml(prompt="<|im_start|>model\n"), OTHER_WAY),
    "a_prompt_at_every_end": (chatml(foot="<|im_start|>assistant\n", prompt=""), OTHER_WAY),
    "no_end": (chatml("{{ m.content }}"), "ends an answer without a special token"),
    "no_special_tokens": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "ends an answer without a special token"),
    "a_text_behind_the_end": (chatml("{{ m.content }}<|im_end|> over"), "writes more text behind the token that ends an answer"),
    "no_answers": (chatml().replace("in messages", "in messages if m.role == 'user'"), OTHER_WAY),
    "nothing": ("", "writes another text than 'b'"),
    "needs_an_answer": (chatml(head="{% if messages[-1].role == 'user' %}{{ raise_exception('no') }}{% endif %}"), "cannot write"),
    "marks_around_everything": (f"{{% generation %}}{chatml()}{{% endgeneration %}}", "marks more than answers"),
    "marks_around_each_turn": (chatml(turn=("{% generation %}", "{% endgeneration %}")), "marks more than answers"),
    "marks_around_nothing": (chatml("{% generation %}{% endgeneration %}{{ m.content }}<|im_end|>"), "marks no text of it as an answer"),
    "marks_in_no_branch_that_is_taken": (chatml("{% if false %}" + ANSWER + "{% endif %}{{ m.content }}<|im_end|>"), "marks no text"),
    "marks_inside_of_marks": (chatml("{% generation %}" + ANSWER + "{% endgeneration %}"), "or they are nested"),
    "marks_that_change_the_text": (chatml("{% set x %}" + ANSWER + "{% endset %}{{ x | length }}{{ x }}"), "another one with the marks"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_without_a_sound_mask_there_is_none(name, encoder):
    template, why = UNSOUND[name]
    with pytest.raises(InputError, match=why) as raised:
        encoded(encoder(template), {"messages": MESSAGES})
    if "so nothing says which tokens to train" in str(raised.value):
        assert "Mark the answers in the template" in str(raised.value) and "chat_template.jinja" in str(raised.value)


PARTS = """{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}{% for line in m.content %}
{%- if line.type == 'text' %}{{ line.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""


def test_a_template_that_reads_lists_of_parts_alone_gets_them(encoder):
    made = encoder(PARTS)
    # What transformers writes of such lists. Of texts, it leaves everything out but the roles.
    assert made.template.render(MESSAGES[:2], add_generation_prompt=False) == "User: a?<|im_end|>\nAssistant: b<|im_end|>\n"
    ids, mask = encoded(made, {"messages": MESSAGES})
    assert made.tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == " b<|im_end|> d<|im_end|>"
    # One that reads both gets texts.
    both = PARTS.replace("{% for line", "{% if m.content is string %}T{{ m.content }}{% else %}{% for line").replace(
        "{% endfor %}<|im_end|>", "{% endfor %}{% endif %}<|im_end|>"
    )
    assert encoder(both).template.render(MESSAGES[:1], add_generation_prompt=False) == "User: Ta?<|im_end|>\n"


FIRST = [{"role": "assistant", "content": "Hello"}, *MESSAGES]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "S"}]], ids=["alone", "behind_a_system_message"])
@pytest.mark.parametrize(
    "head",
    [
        "",
        "{% if messages[0].role != 'system' %}{{ 'D<|im_end|>' }}{% endif %}",
        "{% if loop is not defined and messages | length > 0 %}{{ 'H<|im_end|>' }}{% endif %}",
        "{% if messages | rejectattr('role', 'equalto', 'system') | list | length == 0 %}{{ raise_exception('No turn') }}{% endif %}",
    ],
)
def test_a_conversation_may_begin_with_an_answer(head, system, encoder):
    made = encoder(chatml(head=head))
    ids, mask = encoded(made, {"messages": [*system, *FIRST]})
    assert made.tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == "".join(
        f"{text}<|im_end|>" for text in ("Hello", "b", "d")
    )
    marked = encoder(chatml(ANSWER, head=head))
    assert encoded(marked, {"messages": [*system, *FIRST]}) == (ids, mask)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("answer", ["{{ m.text }}<|im_end|>", "{% generation %}{{ m.content[:0] }}<|im_end|>{% endgeneration %}"])
def test_an_answer_without_its_text_is_refused(answer, is_whole, encoder):
    with pytest.raises(InputError, match=r"messages\[1\]: the chat template .*chat_template.jinja writes another text than 'b'"):
        encoded(encoder(chatml(answer), is_whole=is_whole), {"messages": MESSAGES})


def test_marks_in_a_comment_are_none(encoder):
    made = encoder("{# Without {% generation %}\nmarks. #}" + chatml())
    assert not made.template.has_marks and encoded(made, {"messages": MESSAGES}) == encoded(encoder(chatml()), {"messages": MESSAGES})


def test_blanks_behind_the_end_of_an_answer_are_no_text(encoder):
    template = chatml("{% generation %}{{ m.content }}<|im_end|>{{ '\\n' }}{% endgeneration %}")
    tokens = encoder(template).encode(Conversation(messages=MESSAGES))
    assert not tokens[0] & ENDLESS and np.count_nonzero(tokens & TRAINED) == 6


def test_what_a_sound_template_may_do(encoder):
    made = encoder(chatml(head="{% set d = strftime_now('%d %b %Y') %}{{ d }}"))
    ids, mask = encoded(made, {"messages": MESSAGES})
    # The same day on every day.
    assert made.tokenizer.decode(ids).startswith("26 Jul 2024<|im_start|>")
    assert made.tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == "b<|im_end|>d<|im_end|>"
    # A text that is kept and then written has its marks with it.
    kept = encoder(chatml("{% set x %}" + ANSWER + "{% endset %}{{ x | trim }}"))
    assert encoded(kept, {"messages": MESSAGES}) == encoded(encoder(chatml()), {"messages": MESSAGES})


@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("written", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_all_names_that_templates_read(read, written, encoder):
    made = encoder("{% for m in messages %}{{ m." + read + " }}|{{ m.content }}{% endfor %}", is_whole=True)
    assert made.template.render([{"role": "assistant", "content": "2", written: "1 + 1"}], add_generation_prompt=False) == "1 + 1|2"


def test_on_everything_every_token_is_trained_but_the_first(encoder):
    whole = encoder(chatml("{{ m.content }}"), is_whole=True).encode(Conversation(messages=MESSAGES[:1]))
    assert (whole[1:] & TRAINED).all() and whole[0] & BEGIN and not (whole[1:] & BEGIN).any()


def test_a_conversation_is_cut_at_its_end_while_something_is_left_to_train(encoder):
    full = encoder(chatml()).encode(Conversation(messages=MESSAGES))
    first = int((full & TRAINED != 0).argmax())
    tokens = encoder(chatml(), most=first + 1).encode(Conversation(messages=MESSAGES))
    assert tokens[0] & CUT and not full[0] & CUT
    assert (tokens ^ [CUT, *[0] * first]).tolist() == full[: first + 1].tolist()
    with pytest.raises(InputError, match=rf"first answer begins with token {first + 1}, .* raise model.seq to {first} or more"):
        encoder(chatml(), most=first).encode(Conversation(messages=MESSAGES))


def test_a_conversation_with_tools_has_the_template_for_tools(encoder, tmp_path):
    file = tmp_path / "templates.json"
    named = {"default": chatml(), "tool_use": chatml(head="{{ tools }}")}
    file.write_text(json.dumps({"chat_template": [{"name": name, "template": text} for name, text in named.items()]}))
    made = encoder(chatml())
    made = replace(made, template=template_of(made.tokenizer, str(file), DATE))
    plain = encoded(made, {"messages": MESSAGES})
    assert plain == encoded(encoder(chatml()), {"messages": MESSAGES})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    (tmp_path / "chat_template.jinja").write_text(named["default"])
    beside = replace(made, template=template_of(made.tokenizer, str(tmp_path / "chat_template.jinja"), DATE))
    assert encoded(beside, {"messages": MESSAGES, "tools": [1]}) == encoded(made, {"messages": MESSAGES, "tools": [1]})
    assert beside.template.sha256 == made.template.sha256
    ids, mask = encoded(made, {"messages": MESSAGES, "tools": [1]})
    assert made.tokenizer.decode(ids).startswith("[1]<|im_start|>") and ids[-len(plain[0]) :] == plain[0] and sum(mask) == sum(plain[1])
    assert made.template.sha256 != replace(made.template, for_tools=None).sha256


def test_marks_without_the_end_of_an_answer_are_followed_and_said(encoder):
    template = chatml("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>")
    tokens = encoder(template).encode(Conversation(messages=MESSAGES))
    assert tokens[0] & ENDLESS and np.count_nonzero(tokens & TRAINED) == 2
    rows = ChatRows(stream=Stream((Segment(name="a", tokens=tokens),)), seq=99, packing=True, padding=0)
    assert "In 1 conversations the template's marks leave out the token that ends an answer" in rows.describe("a")
    assert not encoder(chatml(ANSWER)).encode(Conversation(messages=MESSAGES))[0] & ENDLESS


def test_characters_of_several_bytes_have_their_tokens():
    ids, places = ByteTokenizer().encode_spans("aé🙂")
    assert bytes(ids.tolist()).decode() == "aé🙂"
    assert places.tolist() == [[0, 1], [1, 2], [1, 2], [2, 3], [2, 3], [2, 3], [2, 3]]
