"""The keys of a config.json, of which each one is read, or says nothing about the model's function, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jgt.document import InputError, shown


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


ConfigJson = Mapping[str, Any]
"""The keys of a config.json, or of a mapping in it."""
MOST_LAYERS = 10_000
_MOST = 1e18
# Keys without effect on the function of a model with given weights: on its training, its generation, its storage, and its description.
_WITHOUT_EFFECT = words(
    "add_cross_attention architectures attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map "
    "aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop embed_pdrop "
    "embedding_dropout encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_factor "
    "initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty max_length max_new_tokens "
    "max_sequence_length min_length model_max_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix "
    "pretraining_tp problem_type remove_invalid_values repetition_penalty resid_dropout resid_pdrop residual_dropout return_dict "
    "return_dict_in_generate rope_dim router_aux_loss_coef router_jitter_noise sep_token_id seq_aux summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature "
    "tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config "
    "transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict"
)
# Keys that say something with a value that is off, because a model without the key has what they name.
_ON_IF_ABSENT = words(
    "attn_scale causal gated gated_mlp glu is_causal is_gated rope rotary scale_attention scale_attn_weights use_causal_mask use_glu "
    "use_position_embeddings use_positional_embeddings use_rms_norm use_rmsnorm use_rope use_rotary use_rotary_embeddings"
)


_KINDS = {
    bool: "true or false",
    int: "a number above 0",
    float: "a number above 0",
    str: "a text",
    list: "a list of at most 10,000",
    dict: "a mapping",
}


@dataclass
class Keys:
    """The keys of a config.json, of which it remembers those that were read. prefix: of messages, for the keys of a nested mapping."""

    values: ConfigJson
    read: set[str] = field(default_factory=set[str])
    problems: list[str] = field(default_factory=list[str])
    prefix: str = ""

    def get(self, name: str, default: Any = None, *, may_be_zero: bool = False) -> Any:
        """The value of a key; null and an absent key are the default. It has the kind of the default: a number if that is None.

        A number is above 0, unless its default is 0 or it may be 0.
        """
        self.read.add(name)
        value = self.values.get(name)
        wanted = "a number above 0" if default is None else _KINDS[type(default)]
        if value is None:
            return default
        is_fit = _KINDS.get(type(value)) == wanted
        if isinstance(value, list):
            is_fit = is_fit and len(value) <= MOST_LAYERS
        elif is_fit and isinstance(value, int | float):
            is_fit = 0 < value < _MOST or value == 0 == (0 if may_be_zero else default) or isinstance(value, bool)
        if is_fit:
            return value
        self.problems.append(f"{self.prefix}{name} must be {wanted}, not {shown(value)}")
        return default

    def unless_absent(self, name: str, absent: Any) -> Any:
        """As `get`, but only an absent key is `absent`: families take null for something else, which None stands for."""
        self.read.add(name)
        return self.get(name) if name in self.values else absent

    def need(self, name: str, stand_in: Any = 1) -> Any:
        """The value of a key that a family requires; what stands in for it decides its kind."""
        if self.values.get(name) is None:
            self.problems.append(f"{self.prefix}the key {name!r} is missing")
        return self.get(name, stand_in)

    def either(self, name: str, other: str, default: Any = None) -> Any:
        """The value of two keys that say the same, of which a file may have both."""
        value = self.get(name, self.get(other, default))
        if self.get(other, value) != value:
            both = f"{shown(value)}, but {other}: {shown(self.values[other])} says the same. Keep the one that is true"
            self.problems.append(f"{self.prefix}{name}: {both}")
        return value

    def require(self, name: str, *allowed: Any, default: Any = None) -> None:
        """Notes a problem if a key has another value than these, the only ones that jgt's models have."""
        value = self.get(name, allowed[0] if default is None else default)
        if value not in allowed:
            self.problems.append(f"{self.prefix}{name}: {shown(value)} is not supported. Supported: {', '.join(map(shown, allowed))}")

    def ignore(self, *names: str) -> None:
        """Takes keys as read whose values say nothing that other keys do not say."""
        self.read |= set(names)

    def group(self, name: str) -> Keys:
        """The keys of a nested mapping, whose problems are this one's."""
        return Keys(self.get(name, {}), problems=self.problems, prefix=f"{self.prefix}{name}: ")

    def by_layer(self, name: str, value_of: Callable[[int], Any]) -> list[Any]:
        """A list with a value for each layer, which is by default that of its number."""
        count = self.need("num_hidden_layers")
        if type(count) is not int or not 0 < count <= MOST_LAYERS:
            self.problems.append(f"num_hidden_layers: {shown(count)} is not a number of layers from 1 to {MOST_LAYERS:,}")
            return []
        values = self.get(name, [value_of(n) for n in range(count)])
        if len(values) != count:
            self.problems.append(f"{name}: has {len(values):,} entries, but there are {count:,} layers")
        return values

    def refuse_others(self) -> None:
        """Notes a problem for each key that nobody has read and that may change the model."""
        unread = {name: value for name, value in self.values.items() if name not in self.read | _WITHOUT_EFFECT and name[:1] != "_"}
        for name, value in unread.items():
            says_nothing = value is True if name in _ON_IF_ABSENT else not value
            is_full = name == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value)
            if value is not None and not says_nothing and not is_full:
                why = "jgt does not know this key, so the model could be another one"
                self.problems.append(f"{self.prefix}{name}: {shown(value)}: {why}. Remove it if it changes nothing")

    def finish(self, file: Path) -> None:
        """Raises InputError with the problems that were noted. file: where the keys are."""
        if self.problems:
            raise InputError([f"{file}: {problem}" for problem in self.problems])
