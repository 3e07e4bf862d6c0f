"""Opens the conversations of a part of the data: the files, read and encoded once, as a stream whose tokens say what is trained.

The stream is kept like that of encoded text (`encoded.py`). Its key also has all that decides a mask, such as the template, so a changed
template is another data set, for the cache and for a run that resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from jgt.document import InputError

from ..config import BYTES, MixturePart
from ..encoded import open_cached
from ..files import FileSet
from ..packed import TextError
from ..stream import Stream
from ..tokenizer import Tokenizer
from .answers import IDS, TRAINED, Encoder
from .keys import has_pairs
from .messages import read_better_answers, read_conversations, read_preferences, read_questions
from .rows import begins_of
from .template import ChatTemplate

DATE = datetime(2024, 7, 26)
"""The day that templates take for today in training, so that the same data are the same tokens on every day. Llama's assume it."""
_PLAIN = """{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' -%}
{% generation %}{{ message.content }}{{ '\\0' }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}

{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def template_of(tokenizer: Tokenizer, name: str = "auto", date: datetime | None = None) -> ChatTemplate | None:
    """The chat template in a file; auto: the one beside the tokenizer, or None if it has none. Raises InputError."""
    file = tokenizer.special.template if name == "auto" else Path(name)
    return None if file is None else ChatTemplate.read(file, tokenizer.special.texts, date)


def training_template(part: MixturePart, tokenizer: Tokenizer, date: datetime | None = DATE) -> ChatTemplate:
    """The template of a part of the data. Bytes have one that ends an answer with byte 0. Raises InputError if there is none."""
    if (template := template_of(tokenizer, part.template, date)) is not None:
        return template
    if part.tokenizer != BYTES:
        why = "has no chat template beside it: no chat_template.jinja, and none in tokenizer_config.json"
        raise InputError([f"{part.tokenizer}: {why}. Set template to the file of one"])
    return ChatTemplate.of(Path("the template of bytes"), _PLAIN, {}, date)


def open_chats(files: FileSet, part: MixturePart, template: ChatTemplate, tokenizer: Tokenizer, *, seq: int, cache_dir: Path) -> Stream:
    """The conversations of some files, one after another; tokens have the bits of `answers.py`. Raises InputError and UnreadableError."""
    encoder = Encoder(tokenizer=tokenizer, template=template, is_whole=part.train_on == "all", most=seq + 1)
    readers = (read_conversations, read_preferences) if part.path else (read_questions, read_better_answers)
    reader = readers[has_pairs(part.source)]

    def read(path: Path) -> Iterator[np.ndarray | TextError]:
        for row in reader(path):
            if isinstance(row, TextError):
                yield row
                continue
            where, conversations = row
            try:
                encoded = [encoder.encode(conversation) for conversation in conversations]
                if len({(one & (TRAINED | IDS)).tobytes() for one in encoded}) < len(encoded):
                    raise InputError([f"chosen and rejected: are the same in model.seq {seq:,}. Remove the row, or raise model.seq"])
                yield np.concatenate(encoded)
            except InputError as error:
                why = "; ".join(error.problems)
                yield TextError(f"{where}: {why}", why=why)

    ids = [sorted(tokenizer.special_ids), tokenizer.identity]
    key: list[object] = [part.source, part.path is None, part.train_on, template.sha256, seq, *ids]
    return open_cached(files, read, lambda items: items, key=key, dtype="uint32", cache_dir=cache_dir)


def held_out_from(stream: Stream, count: int, part: MixturePart) -> int:
    """The position from which the last conversations, or pairs, with at least so many tokens together begin; 0 if these are all of them."""
    begins = begins_of(stream)[:: 2 if has_pairs(part.source) else 1]
    return int(begins[max(np.searchsorted(begins, len(stream) - count, side="right") - 1, 0)])
