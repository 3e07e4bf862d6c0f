"""The `data:` section of a run's YAML, and what can be wrong with it and with the paths that it names.

A wrong data path is among the most common mistakes, and the worst time to learn of it is after JAX has started on a thousand
devices. So the section and its paths are checked before JAX, numpy or Grain is imported, and this module imports none of
them. The check has two parts. `problems()` needs the keys alone: `bind` calls it while it reads the file. `path_problems` looks at
names, kinds and permissions of files, but opens none, so that it is fast for any amount of data. What only the contents can
show (a bad line, an id outside the vocabulary) is left to `open_data`.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from jgt.document import Bound, LocalPath, Node, shown

from ..files.bucket import PathOrUrl
from ..files.cache import ObjectCache
from ..settings.code.names import OR_OWN, SHIPPED_DATA, is_name
from .chat.keys import CHATS, ChatKeys

Problem = tuple[str, str]
"""A key of the section, and what is wrong with it."""
BYTES = "bytes"
"""The name of the tokenizer whose ids are the bytes of the text."""
# Beyond this ratio of weights, the lighter part of a mixture would practically never be read.
_MAX_WEIGHT_RATIO = 1e6
MAX_PARTS = 1_000
_MAX_PROBLEMS = 20
_MAX_NAME = 60
_Source = Literal["stdlib", "text", "tokens", "jsonl", "parquet", "arrow", "chat", "preferences", "mixture"]
_DOCUMENTS = ("jsonl", "parquet", "arrow")
"""The sources that read one field of each document."""
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "tokens": (".bin", ".npy", ".idx"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tar": (".tar",),
}
"""How the names of a source's files end. An .idx file belongs to the .bin file beside it."""


@dataclass(frozen=True, kw_only=True)
class _SourceKeys(ChatKeys):
    """The keys that a single source and a part of a mixture share.

    path: a file, a folder (all visible files below it) or a glob, in which `**` does not follow links. Or the [URL](stores.md#data) of such
    in a bucket. Required by every source except `stdlib`, `chat`, `preferences` and `mixture`.
    eval_path: held-out data of the same kind.
    field: for `jsonl`, `parquet` and `arrow`: the field or column that contains the text of a document.
    tokenizer: `bytes`, or the path or URL of a `tokenizer.json` (needs the extra `tokenizers`). For `tokens` it is only used for the prompt
    and the generated text.
    dtype: for `tokens`: the type of the numbers in `.bin` files that do not give it themselves.
    """

    path: PathOrUrl | None = None
    eval_path: PathOrUrl | None = None
    field: str = "text"
    tokenizer: PathOrUrl = BYTES
    dtype: Literal["uint16", "uint32"] = "uint16"


@dataclass(frozen=True, kw_only=True)
class MixturePart(_SourceKeys):
    """An entry of `data.mixture`: one source, and its share of the windows.

    weight: the share of the windows, relative to the other weights.
    source: stdlib (the source text of Python's standard library), text (plain files), tokens (.npy and .bin), jsonl (one JSON object per
    line), parquet, arrow or chat (conversations in JSON lines or Parquet). Files of text, jsonl and chat may be packed (.gz, .zst).
    name: the name of the part in metrics: up to 60 letters, digits, `_`, `-` and dots. null: `stdlib`, or the last part of `path` that is
    not a pattern, without its ending (`notes` for `notes/*.md`); with the number of the part (`notes-1`) if several would have the same
    name.
    """

    weight: Annotated[float, Bound(above=0, high=1_000_000)]
    source: Literal["stdlib", "text", "tokens", "jsonl", "parquet", "arrow", "chat"] = "stdlib"
    name: str | None = None

    @property
    def label(self) -> str:
        """The part in messages."""
        return self.path or self.source

    @property
    def metric_name(self) -> str:
        """The part in metrics: its name or, without one, the last part of its path that is not a pattern."""
        if self.name is not None:
            return self.name
        parts = [part for part in Path(self.path or self.source).parts if not glob.has_magic(part)]
        stem = re.sub(r"[^\w-]+", "-", parts[-1].split(".")[0] if parts else "", flags=re.ASCII).strip("-")
        return stem[:_MAX_NAME] or self.source

    def problems(self) -> Iterator[Problem]:
        """Keys that the source needs or does not read."""
        if self.name is not None and not re.fullmatch(rf"[\w.-]{{1,{_MAX_NAME}}}", self.name, re.ASCII):
            yield "name", f"{shown(self.name)} cannot be part of a metric's name. Use at most {_MAX_NAME} letters, digits, dots and dashes"
        if self.source == "stdlib":
            for key in ("path", "eval_path"):
                if getattr(self, key) is not None:
                    yield key, f"the source stdlib reads no {key}. Remove the key, or set source to the kind of the files: text, jsonl, .."
        elif self.path is None and self.source not in CHATS:
            yield "path", f"the source {self.source} needs a path: a file, a folder or a glob"
        if self.field != "text" and self.source not in _DOCUMENTS:
            yield "field", f"only the sources {', '.join(_DOCUMENTS)} have fields, and source is {self.source}. Remove the key"
        if self.dtype != "uint16" and self.source != "tokens":
            yield "dtype", f"only the source tokens has a dtype, and source is {self.source}. Remove the key"
        yield from self.unread(self.source)


@dataclass(frozen=True, kw_only=True)
class DataConfig(_SourceKeys):
    """The `data:` section: the training data and its held-out split.

    source: documents (stdlib, text, tokens, jsonl, parquet, arrow), conversations (chat), pairs of answers (preferences), or a mixture of
    sources.
    eval_tokens: without `eval_path`: the number of tokens at the end of the data that are held out for evaluation; 0: no evaluation. null:
    5 % of the tokens, at least one window and at most 500,000 tokens; none if no window would remain to train on. In a mixture, this many
    are held out from each part without its own `eval_path`.
    shuffle: true: a new order of the windows in every pass over the data; false: the order of the files.
    documents: join: a token attends to all earlier tokens of its window. mask: only to those of its own document, and positions
    count from its beginning.
    end_of_text: for `tokens` with `documents: mask`: the id that ends a document. null: the end-of-text token of `tokenizer`, which must
    then be a `tokenizer.json`.
    order: the order in which the tokens of a row reach the devices. zigzag: as attention on [long sequences](context.md#which-method)
    computes, so that nothing is exchanged for it.
    mixture: for `mixture`: the parts.
    cache: for URLs: the folder of local [copies](stores.md#data); null: `jgt/objects` in the user's folder of caches.
    cache_bytes: the limit of all copies in that folder together; null: what the disk has.
    """

    WORDS: ClassVar[Mapping[str, str]] = {"sources": "data.mixture", "datasets": "data.mixture", "parts": "data.mixture"}
    source: Annotated[_Source, f"A dataset of Hugging Face is hf:NAME. {OR_OWN}"] = "stdlib"
    eval_tokens: Annotated[int, Bound(low=0, high=10**12)] | None = None
    shuffle: bool = True
    documents: Literal["join", "mask"] = "join"
    end_of_text: Annotated[int, Bound(low=0, high=2**31 - 1)] | None = None
    order: Literal["plain", "zigzag"] = "plain"
    mixture: tuple[MixturePart, ...] = ()
    cache: LocalPath | None = None
    cache_bytes: Annotated[int, Bound(low=1, high=10**15)] | None = None

    @property
    def copies(self) -> ObjectCache:
        """The cache of objects."""
        return ObjectCache(folder=self.cache, most_bytes=self.cache_bytes)

    @staticmethod
    def variant(node: Node) -> type:
        """The class of the section, by its `source`."""
        return OwnData if is_name(node.find("source").value) else DataConfig

    def parts(self) -> tuple[MixturePart, ...]:
        """The parts of the mixture; a single source is a mixture of one."""
        if self.source == "mixture":
            return self.mixture
        keys = {key: getattr(self, key) for key in _SourceKeys.__dataclass_fields__}
        return (MixturePart(weight=1.0, source=cast("Any", self.source), **keys),)

    @property
    def has_chats(self) -> bool:
        """Whether some rows are conversations."""
        return any(part.source in CHATS for part in self.parts())

    @property
    def has_segments(self) -> bool:
        """Whether batches say where documents or conversations begin."""
        return self.documents == "mask" or any(part.source == "chat" and part.packing for part in self.parts())

    @property
    def tokenizer_name(self) -> str | None:
        """The tokenizer of the texts, which all parts share; None if nothing says how the ids of token files were made."""
        parts = self.parts()
        return None if parts[0].tokenizer == BYTES and all(part.source == "tokens" for part in parts) else parts[0].tokenizer

    @property
    def eval_parts(self) -> tuple[str, ...]:
        """The names in metrics of the parts that are to hold data out."""
        return tuple(name for name, part in zip(self.part_names(), self.parts(), strict=True) if part.eval_path or self.eval_tokens != 0)

    def part_names(self) -> tuple[str, ...]:
        """The name of each part in metrics. Parts without names of their own that would share one get their number as well."""
        names = [part.metric_name for part in self.parts()]
        taken = Counter(names)
        own = [part.name for part in self.parts()]
        return tuple(name if own[i] or taken[name] == 1 else f"{name}-{i}" for i, name in enumerate(names))

    def problems(self) -> Iterator[Problem]:
        """Problems of the parts; keys beside a mixture that belong in its parts; parts that cannot be mixed."""
        yield from self._end_problems()
        if self.source == "mixture":
            yield from self._mixture_problems()
            return
        yield from self.parts()[0].problems()
        if self.mixture:
            yield "mixture", f"has {len(self.mixture)} parts, but source is {self.source}. Set source to mixture, or remove the parts"

    def _end_problems(self) -> Iterator[Problem]:
        if self.documents == "mask" and all(part.source in CHATS for part in self.parts()):
            yield "documents", f"the source {self.parts()[0].source} has conversations, which never attend to each other. Remove the key"
        token_parts = [part for part in self.parts() if part.source == "tokens"]
        if self.end_of_text is None:
            # A tokenizer.json has such an id. The tokenizer of bytes is only the default, and says nothing of ids that were made elsewhere.
            if self.documents == "mask" and any(part.tokenizer == BYTES for part in token_parts):
                yield (
                    "end_of_text",
                    "documents: mask needs the id that ends a document in token files. Give it, or a tokenizer.json that has one",
                )
        elif self.documents != "mask":
            yield "end_of_text", "only documents: mask reads it. Remove the key, or set documents to mask"
        elif not token_parts:
            yield "end_of_text", "only the source tokens reads it, because other sources end documents themselves. Remove the key"

    def _mixture_problems(self) -> Iterator[Problem]:
        # A key with its default may have been written all the same; it means nothing either way.
        for key, declared in _SourceKeys.__dataclass_fields__.items():
            if getattr(self, key) != declared.default:
                yield key, "a mixture takes this key in each of its parts. Move it there"
        if not self.mixture:
            yield "mixture", "the source mixture needs at least one part, for example [{source: stdlib, weight: 1}]"
            return
        if len(self.mixture) > MAX_PARTS:
            yield "mixture", f"has {len(self.mixture):,} parts; at most {MAX_PARTS} are allowed. Join sources of equal weight with a glob"
        if twice := [name for name, count in Counter(self.part_names()).items() if count > 1]:
            yield "mixture", f"several parts have the name {twice[0]}. Give each of them another name"
        tokenizers = sorted({part.tokenizer for part in self.mixture})
        if len(tokenizers) > 1:
            yield "mixture", f"the parts use different tokenizers: {', '.join(tokenizers[:_MAX_PROBLEMS])}. Use one for all of them"
        weights = [part.weight for part in self.mixture]
        if max(weights) > _MAX_WEIGHT_RATIO * min(weights):
            yield "mixture", f"the weights {max(weights)} and {min(weights)} differ by more than a factor of {_MAX_WEIGHT_RATIO:.0e}"


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """A function of the user that returns samples, which are dicts of arrays. See `train.data.own`.

    source: MODULE:NAME of the function, hf:NAME for a dataset of Hugging Face or a folder with its files, or tar:PATH for files of
    WebDataset.
    shuffle: for samples with an index: a new random order in every epoch; false: their own order.
    shuffle_buffer: for a [stream](#streams): how many samples are shuffled together; 0: its own order.
    resume: for a stream that cannot say where it is: skip reads it again when a run resumes; exact refuses it.
    transform: `MODULE:NAME` of a function that [changes the training samples at random](#augmentation).
    arguments: all further keys, which are passed to it.
    """

    REST: ClassVar[str] = "arguments"
    source: str
    shuffle: bool = True
    shuffle_buffer: Annotated[int, Bound(low=0, high=10**9)] = 0
    resume: Literal["skip", "exact"] = "skip"
    transform: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    eval_parts: ClassVar[tuple[str, ...]] = ()

    @property
    def is_shipped(self) -> bool:
        """Whether jgt reads the source itself, without code of the user's."""
        return self.source.partition(":")[0] in SHIPPED_DATA

    @property
    def has_texts(self) -> bool:
        """Whether samples are rows of tokens, which need no loss of the user's own."""
        return self.is_shipped and "text" in self.arguments

    @property
    def tokenizer_name(self) -> str | None:
        """The tokenizer of the texts; None without texts."""
        return str(self.arguments.get("tokenizer", BYTES)) if self.has_texts else None

    def problems(self) -> Iterator[Problem]:
        """A buffer to shuffle in, without shuffling; a name that is empty."""
        if self.source in (f"{kind}:" for kind in SHIPPED_DATA):
            yield "source", f"{self.source} needs a name behind it, such as {self.source}NAME"
        if self.transform is not None and not is_name(self.transform):
            yield (
                "transform",
                f"{shown(self.transform)} is not MODULE:NAME of a function transform(sample, rng) (docs/own.md)",
            )
        if self.shuffle_buffer and not self.shuffle:
            yield "shuffle_buffer", f"is {self.shuffle_buffer:,}, but shuffle is false. Remove one of them"
