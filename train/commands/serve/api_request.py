"""The body of a request as OpenAI's API has it, read and checked: what a client asks for.

Keys that would change an answer and that the model cannot obey are refused, so that no client believes they have an effect. The defaults
are those of the section `generate:`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgt.document import InputError, shown

from ...files.json_text import json_value
from ...generate.batch import TextRequest
from ...generate.chat import Chat
from ...generate.generate import Generator

_SETTINGS: Mapping[str, str] = {
    "max_tokens": "tokens",
    "max_completion_tokens": "tokens",
    "n": "samples",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")},
}
"""The key of the section `generate:` for a key of the API."""
_OTHERS = {"model", "prompt", "messages", "stream", "stream_options", "seed"}
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Keys that change no answer."""
_NEUTRAL: Mapping[str, Sequence[object]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("tools", "functions", "logit_bias", "bad_words", "stop_token_ids", "chat_template_kwargs"), ([], {})),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(
        ("logprobs", "echo", "ignore_eos", "use_beam_search", "continue_final_message", "include_stop_str_in_output"), (False,)
    ),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "detokenize", "include_reasoning"), (True,)),
    "suffix": ("",),
}
"""Values that equal the default behaviour and are accepted. Any other but null would change an answer."""
_TOOLS = "the model's text is not searched for calls. Describe the tools in a message, or serve the model of jgt export with vLLM"
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("tools", "functions", "tool_choice", "function_call"), _TOOLS),
    "response_format": "nothing holds the text to JSON. Ask for it in a message, or serve the model of jgt export with vLLM",
    **dict.fromkeys(("logprobs", "top_logprobs"), "answers are texts alone. jgt eval and loaded.logits have probabilities"),
}
"""Why keys that clients often send are refused, and what to do."""
_MOST_STOPS, _MOST_STOP_CHARACTERS = 16, 256


class UnknownModelError(Exception):
    """A model that is not served."""


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A parsed request.

    requests: those of all answers, by prompt and then by sample. prompt_tokens: of all prompts together. streams: the text is sent as it is
    written. counts: a stream ends with the numbers of tokens.
    """

    requests: Sequence[TextRequest]
    prompt_tokens: int
    is_chat: bool
    streams: bool
    counts: bool


@dataclass(frozen=True, kw_only=True)
class RequestReader:
    """Reads requests for a model. name: the model's. chat: None if it has no tokenizer. most: the most answers of one request."""

    generator: Generator
    chat: Chat | None
    name: str
    most: int

    @property
    def most_bytes(self) -> int:
        """The largest body that is read, which is larger than any prompt that fits the model."""
        return 65_536 + 32 * self.generator.longest

    def read(self, data: bytes, *, is_chat: bool) -> ApiRequest:
        """The request in a body. Raises InputError, or UnknownModelError."""
        body = _object(data)
        self.check_name(body.get("model"))
        changes = _changes(body, is_chat)
        prompts = [self._chat_prompt(body)] if is_chat else _prompts(body.get("prompt"))
        samples = changes.get("samples", 1)
        if isinstance(samples, int) and len(prompts) * samples > self.most:
            raise InputError([f"n: {len(prompts)} prompts with {samples} answers to each are more than {self.most} answers"])
        seed = body.get("seed")
        seed = secrets.randbits(32) if seed is None else seed % 2**32
        try:
            requests = self.generator.requests(prompts, seed=seed, **changes)
        except InputError as error:
            # The messages name keys as the section `generate:` does.
            names = {ours: key for key, ours in _SETTINGS.items() if body.get(key) is not None}
            found = (problem.removeprefix("generate: generate.").partition(":") for problem in error.problems)
            raise InputError("".join((names.get(key, key), *rest)) for key, *rest in found) from None
        options = body.get("stream_options")
        return ApiRequest(
            requests=requests,
            prompt_tokens=sum(len(request.tokens) for request in requests[:: len(requests) // len(prompts)]),
            is_chat=is_chat,
            streams=body.get("stream") is True,
            counts=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def check_name(self, name: object) -> None:
        """Raises UnknownModelError for the name of another model."""
        if name not in (None, self.name):
            raise UnknownModelError(f"the model {shown(name)} is not served here. There is: {shown(self.name)}")

    def _chat_prompt(self, body: Mapping[str, object]) -> list[int]:
        if self.chat is None:
            raise InputError(["the model has no tokenizer, so it cannot chat. Send lists of tokens to /v1/completions"])
        return self.chat.prompt(body.get("messages"))


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json_value(data)
        # JSON may have halves of surrogate pairs, which no tokenizer reads.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError([f"the body is not JSON: {error}"]) from None
    if not isinstance(body, dict):
        raise InputError(["the body must be a JSON object"])
    return body


def _problems(body: Mapping[str, object], is_chat: bool) -> Iterator[str]:
    """The problems of a body, without those of its prompt and of the values of its settings."""
    # A chat's template writes the beginning of a text itself.
    known, neutral = {*_SETTINGS, *_OTHERS, *_IGNORED}, {**_NEUTRAL, "add_special_tokens": (not is_chat,)}
    for key, value in body.items():
        # In Python, false is 0.
        same = (one == value and isinstance(one, bool) == isinstance(value, bool) for one in neutral.get(key, ()))
        if not (key in known or value is None or any(same)):
            why = f": {_REASONS[key]}" if key in _REASONS else ". Leave it out"
            yield f"{shown(key, quotes=False)}: {shown(value)} is not supported{why}"
    if not isinstance(body.get("stream"), bool | None):
        yield f"stream: must be true or false, not {shown(body['stream'])}"
    if not isinstance(body.get("seed"), int | None) or isinstance(body.get("seed"), bool):
        yield f"seed: must be a whole number, not {shown(body['seed'])}"


def _changes(body: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """The keys of the section `generate:`. Raises InputError with all keys that are not supported."""
    problems = [*_problems(body, is_chat)]
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    is_list = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not (is_list and all(isinstance(text, str) and len(text) <= _MOST_STOP_CHARACTERS for text in stops)):
        problems.append(f"stop: must be at most {_MOST_STOPS} texts of at most {_MOST_STOP_CHARACTERS} characters")
    if problems:
        raise InputError(problems)
    given = {ours: body[key] for key, ours in _SETTINGS.items() if body.get(key) is not None}
    # As other servers have it: all tokens, and the likeliest alone.
    given |= ({"top_k": 0} if given.get("top_k") == -1 else {}) | ({"top_p": 1e-9} if given.get("top_p") == 0 else {})
    return given | ({"stop": stops} if stop is not None else {})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, a list of tokens, or a list of such. Raises InputError."""
    prompts = prompt if isinstance(prompt, list) and prompt and not _are_tokens(prompt) else [prompt]
    if not all(isinstance(one, str) or _are_tokens(one) for one in prompts):
        raise InputError(["prompt: must be a text, a list of tokens, or a list of texts or of lists of tokens"])
    return prompts


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
