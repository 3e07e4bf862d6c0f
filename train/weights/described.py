"""A published model's config.json, read as the keys of the `model:` section.

Every key is read by its family, or is known to say nothing about the model's function. Any other key is refused by its name: a model that
ignores one would compute something else, without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jgt.document import InputError, Node, nearest, shown

from ..models.config import ModelConfig
from .families import FAMILIES, Family, words

MOST_BYTES = 1 << 20
MOST_TOKENS = 4096
"""The length of sequences where the run's file gives none."""
# Keys without effect on the function of a model with given weights: on its training, its generation, its storage, and its description.
_WITHOUT_EFFECT = words(
    "_attn_implementation _name_or_path add_cross_attention architectures attention_dropout attention_probs_dropout_prob "
    "attn_implementation attn_pdrop auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation "
    "chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id do_sample dtype embd_pdrop "
    "embed_pdrop embedding_dropout eos_token_id ep_size finetuning_task gradient_checkpointing hidden_dropout hidden_dropout_prob "
    "id2label initializer_factor initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id max_length "
    "min_length model_type n_ctx output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type "
    "resid_dropout resid_pdrop return_dict rope_dim router_aux_loss_coef router_jitter_noise sep_token_id "
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params temperature "
    "tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version unk_token_id use_bfloat16 use_cache "
    "use_return_dict"
)


@dataclass
class Keys:
    """The keys of a config.json, of which it remembers those that were read."""

    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set[str])
    problems: list[str] = field(default_factory=list[str])

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; null and an absent key are the default."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The value of a key that a family requires."""
        value = self.get(name)
        if value is None:
            self.problems.append(f"the key {name!r} is missing")
        return value

    def require(self, name: str, *allowed: Any, default: Any = None) -> None:
        """Notes a problem if a key has another value than these, the only ones that jgt's models have."""
        value = self.get(name, allowed[0] if default is None else default)
        if value not in allowed:
            self.problems.append(f"{name}: {shown(value)} is not supported. Supported: {', '.join(map(shown, allowed))}")

    def group(self, name: str) -> Keys:
        """The keys of a nested mapping, whose problems are this one's."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self.problems.append(f"{name} must be a mapping, not {shown(value)}")
            value = {}
        return Keys(value, problems=self.problems)

    def refuse_others(self, inside: str = "") -> None:
        """Notes a problem for each key that nobody has read and that may change the model."""
        for name, value in self.values.items():
            if name not in self.read and name not in _WITHOUT_EFFECT and value is not None:
                self.problems.append(f"{inside}{name}: {shown(value)}: jgt does not know this key, so the model could be another one")


@dataclass(frozen=True)
class Described:
    """A published model: the folder or file that was named, the text of its config.json, its family and the keys of the model section."""

    path: Path
    config: Mapping[str, Any]
    family: Family
    keys: Mapping[str, Any]


def published(path: Path) -> Described:
    """The model of a folder with config.json, or of a config.json. Raises InputError with every problem."""
    file = path if path.suffix == ".json" else path / "config.json"
    return replace(described_by(_read(file), file), path=path)


def described_by(config: Mapping[str, Any], file: Path) -> Described:
    """The model that the contents of a config.json describe. Raises InputError with every problem."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError([f"{file}: model_type: {shown(kind)} is not known. {nearest(str(kind), FAMILIES)}"])
    keys = Keys(config, read={"model_type"})
    try:
        options = family.options(keys)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        # A value of a wrong type. A problem that was noted before says more.
        raise InputError(
            [f"{file}: {problem}" for problem in keys.problems] or [f"{file}: a value has the wrong type for {kind}"]
        ) from None
    keys.refuse_others()
    if keys.problems:
        raise InputError([f"{file}: {problem}" for problem in keys.problems])
    if options.get("kind") != "gpt":
        # A sequence of the greatest length that the model was made for is more than most devices hold.
        options["seq"] = min(options["seq"] or MOST_TOKENS, MOST_TOKENS)
    return Described(path=file, config=config, family=family, keys={name: value for name, value in options.items() if value is not None})


def with_published(root: Node) -> Node:
    """A run's document whose model section also has what the config.json of `model.hf` says.

    The tokenizer is that of the folder, unless the document names another. Raises InputError, also for a key of the section that says
    something else than config.json; only `seq` may.
    """
    model, name = root.find("model"), root.find("model.hf").value
    is_resolved = ModelConfig.__dataclass_fields__.keys() <= model.children.keys()
    if root.find("model.hf").key != "model.hf" or not isinstance(name, str) or is_resolved:
        # The config.yaml of a run has every key, wherever the folder is now.
        return root
    described = published(Path(name))
    file = described.path if described.path.suffix == ".json" else described.path / "config.json"
    both = [(child, described.keys[key]) for key, child in model.children.items() if key in described.keys and key != "seq"]
    different = [child.problem(f"{file} says {shown(value)}. Leave the key out") for child, value in both if child.plain() != value]
    if different:
        raise InputError(different)
    theirs = Node.of(dict(described.keys), f"{file}:1", "model")
    root = replace(root, value={**root.children, "model": replace(model, value={**theirs.children, **model.children})})
    data, tokenizer = root.find("data"), described.path / "tokenizer.json"
    if data.key == "data" and "tokenizer" not in data.children and tokenizer.is_file():
        own = {"tokenizer": Node(str(tokenizer), f"{file}:1", "data.tokenizer")}
        root = replace(root, value={**root.children, "data": replace(data, value={**data.children, **own})})
    return root


def _read(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError([f"{file}: {error.strerror or error}. Name a folder with config.json, or the file itself"]) from None
    if len(text) > MOST_BYTES:
        raise InputError([f"{file}: is larger than {MOST_BYTES} bytes, which no config.json is"])
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError([f"{file}: is not JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise InputError([f"{file}: must be a mapping of keys to values"])
    return config
