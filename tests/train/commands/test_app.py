"""The API of `jgt serve` in this process: a batch that repeats the prompt takes the place of the model's, and all else is real."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
from asgi import ask

from train.data.tokenizer import ByteTokenizer
from train.generate.batch import Token
from train.generate.chat import Chat
from train.generate.generate import Generator
from train.generate.writer import TextWriter
from train.settings.sampling import GenerateConfig

pytest.importorskip("starlette")

from train.commands.serve import app as app_file
from train.commands.serve.__main__ import _is_local
from train.commands.serve.api_request import RequestReader
from train.commands.serve.app import Api
from train.commands.serve.engine import Engine

BYTES = ByteTokenizer()
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ROWS, LONGEST, WAITING = 2, 200, 6


class Parrot:
    """A batch whose answers repeat the prompt again and again. It writes while `goes` is set."""

    def __init__(self):
        self.goes, self.rows, self.failure = threading.Event(), {}, None
        self.goes.set()

    @property
    def num_free(self):
        return ROWS - len(self.rows)

    @property
    def is_busy(self):
        return bool(self.rows)

    def joining(self, waiting):
        return waiting[: min(self.num_free, 1)]

    def admit(self, requests):
        assert len(requests) <= min(self.num_free, 1)
        self.rows |= dict.fromkeys(requests, 0)
        return [self._token(request) for request in requests]

    def step(self):
        assert self.goes.wait(20)
        if self.failure is not None and self.rows:
            raise self.failure
        return [self._token(request) for request in list(self.rows)]

    def release(self, request):
        self.rows.pop(request, None)

    def _token(self, request):
        count = self.rows[request] = self.rows[request] + 1
        token = request.tokens[(count - 1) % len(request.tokens)]
        reason = "stop" if token in request.ends else "length" if count == request.limit else None
        if reason:
            del self.rows[request]
        return Token(request, token, -1.0, reason)


class Repeating(Generator):
    """The requests of a model with this configuration."""

    def __init__(self, config):
        self._programs = SimpleNamespace(caching=SimpleNamespace(longest=LONGEST), vocab=256)
        self._tokenizer, self._ends, self._config, self.seed = BYTES, frozenset([0]), config, 0


class Served:
    """An API with its engine, whose thread runs."""

    def __init__(self, token=b""):
        self.batch = Parrot()
        self.engine = Engine(TextWriter(self.batch, BYTES.decode), most_waiting=WAITING)
        generator = Repeating(GenerateConfig(temperature=0, tokens=5))
        reader = RequestReader(generator=generator, chat=Chat(tokenizer=BYTES, template=None), name="parrot", most=WAITING)
        self.app = Api(engine=self.engine, reader=reader, token=token, is_local=_is_local).app()
        self.engine.start()

    def ask(self, path, body=None, **options):
        return asyncio.run(ask(self.app, path, body, **options))


@pytest.fixture
def served():
    made = Served()
    yield made
    made.batch.goes.set()
    made.engine.stop()
    made.engine.join()


async def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


# -- answers ------------------------------------------------------------------------------------------------------------


def test_a_completion_in_openais_form(served):
    answered = served.ask(COMPLETIONS, {"model": "parrot", "prompt": "abc", "max_tokens": 4})
    made = answered.json
    assert (answered.status, answered.headers["content-type"]) == (200, "application/json")
    assert made.pop("id").startswith("cmpl-") and abs(made.pop("created") - time.time()) < 60
    assert made == {
        "object": "text_completion",
        "model": "parrot",
        "choices": [{"index": 0, "text": "abca", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_a_chat_in_openais_form(served):
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    made = served.ask(CHATS, {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": parts}]}).json
    assert (made["object"], made["id"][:9]) == ("chat.completion", "chatcmpl-")
    message = {"role": "assistant", "content": "ab\nca"}
    assert made["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


def test_several_prompts_have_several_answers_each(served):
    made = served.ask(COMPLETIONS, {"prompt": ["ab", [99, 100, 101]], "n": 2, "max_completion_tokens": 3}).json
    assert [(one["index"], one["text"]) for one in made["choices"]] == [(0, "aba"), (1, "aba"), (2, "cde"), (3, "cde")]
    assert made["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


def test_a_stream_has_the_text_of_the_whole_answer(served):
    answered = served.ask(COMPLETIONS, {"prompt": "a€", "max_tokens": 7, "stream": True})
    *events, end = answered.events
    assert answered.headers["content-type"].startswith("text/event-stream") and end == "[DONE]"
    choices = [choice for text in events for choice in json.loads(text)["choices"]]
    # A character comes when it is complete, and the rest of one at the end as a replacement.
    assert [choice["text"] for choice in choices] == ["a", "€", "a", "\ufffd"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_a_stream_of_a_chat_says_who_speaks_and_counts_tokens_if_asked(served):
    body = {"messages": [{"role": "user", "content": "ab"}], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *events, counts, end = served.ask(CHATS, {**body, "stop": "ba", "max_tokens": 4}).events
    assert end == "[DONE]" and json.loads(counts)["choices"] == []
    # The stop text ends with the third token, and the second one is held back.
    assert json.loads(counts)["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    for index in (0, 1):
        mine = [choice for text in events for choice in json.loads(text)["choices"] if choice["index"] == index]
        assert [choice["delta"] for choice in mine] == [{"role": "assistant", "content": "a"}, {"content": ""}]
        assert [choice["finish_reason"] for choice in mine] == [None, "stop"]


def test_an_answer_ends_with_a_stop_token(served):
    (choice,) = served.ask(COMPLETIONS, {"prompt": [97, 98, 0]}).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


def test_the_settings_of_a_request_and_its_seed():
    reader = RequestReader(generator=Repeating(GenerateConfig(top_k=7)), chat=None, name="parrot", most=9)
    given = {"prompt": "a", "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 2, "stop": ["x"], "n": 2}
    api_request = reader.read(json.dumps({**given, "seed": -1}).encode(), is_chat=False)
    sampling = api_request.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.top_k) == (0.5, 0.25, 0.125, 2, 7)
    assert [(request.seed, request.number, request.stop) for request in api_request.requests] == [(2**32 - 1, n, ("x",)) for n in (0, 1)]
    seeds = {reader.read(b'{"prompt": "a", "seed": null}', is_chat=False).requests[0].seed for _ in range(3)}
    assert len(seeds) == 3


NOTHING = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "min_tokens"), 0),
    **dict.fromkeys(("echo", "logprobs", "ignore_eos", "use_beam_search", "continue_final_message"), False),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt", "detokenize"), True),
    "tools": [],
    "functions": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "tool_choice": "auto",
    "function_call": "none",
    "parallel_tool_calls": False,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "best_of": 1,
    "suffix": "",
    "stream": False,
    "top_k": -1,
    "unknown": None,
}
ASKS = [
    *({key: False} for key in ("add_generation_prompt", "skip_special_tokens", "detokenize", "include_reasoning", "enable_thinking")),
    {"logprobs": 0},
    {"echo": True},
    {"think": True},
    {"modalities": ["text", "audio"]},
    {"tool_choice": "required"},
    {"presence_penalty": 0.5},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"unknown": []},
]


def test_what_asks_for_nothing_is_taken_and_what_is_not_followed_is_refused(served):
    user = {"messages": [{"role": "user", "content": "ab"}]}
    for path, body, special in ((COMPLETIONS, {"prompt": "ab"}, True), (CHATS, user, False)):
        wanted = [(one["message"]["content"] if path == CHATS else one["text"]) for one in served.ask(path, body).json["choices"]]
        answered = served.ask(path, {**body, **NOTHING, "add_special_tokens": special}).json["choices"]
        assert [(one["message"]["content"] if path == CHATS else one["text"]) for one in answered] == wanted
        for asked in (*ASKS, {"add_special_tokens": not special}):
            answered, (key, value) = served.ask(path, {**body, **asked}), next(iter(asked.items()))
            assert answered.status == 400 and f"{key}: {json.dumps(value)[:3]}" in answered.json["error"]["message"].replace("'", '"')


def test_the_least_top_p_is_the_likeliest_token_alone():
    reader = RequestReader(generator=Repeating(GenerateConfig()), chat=None, name="parrot", most=9)
    sampling = reader.read(b'{"prompt": "a", "top_p": 0, "top_k": -1}', is_chat=False).requests[0].sampling
    assert 0 < sampling.top_p < 1e-6 and sampling.top_k == 0


def test_models_and_health(served):
    (model,) = served.ask("/v1/models").json["data"]
    assert (model["id"], model["object"]) == ("parrot", "model")
    assert served.ask("/v1/models/parrot").json == model
    assert served.ask("/health").json == {"status": "ok", "open": 0}


# -- what is refused ----------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[" * 50_000, "the body is not JSON"),
        (b'{"prompt": ' + b"9" * 9_000 + b"}", "the body is not JSON"),
        (b"\xff\xfe\x00", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        ({}, "prompt: must be a text"),
        ({"prompt": []}, "prompt: must be a text"),
        ({"prompt": ["a", 3]}, "prompt: must be a text"),
        ({"prompt": [1, True]}, "prompt: must be a text"),
        ({"prompt": [256]}, "the prompt has the token 256, but model.vocab is 256"),
        ({"prompt": "a" * LONGEST}, "the prompt has 200 tokens, and model.seq 200 leaves no room"),
        ({"prompt": "a", "temperature": -1}, "temperature: -1.0 is too small"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: "),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: "),
        ({"prompt": "a", "top_p": 1.5}, "top_p: 1.5 is too large"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: 0 is too small"),
        ({"prompt": "a", "max_completion_tokens": -5}, "max_completion_tokens: -5 is too small"),
        ({"prompt": "a", "stream": "yes"}, "stream: must be true or false, not 'yes'"),
        ({"prompt": "a", "seed": True}, "seed: must be a whole number, not true"),
        ({"prompt": "a", "n": 0}, "n: 0 is too small"),
        ({"prompt": "a", "n": 7}, "n: 1 prompts with 7 answers to each are more than 6 answers"),
        ({"prompt": ["a"] * 7}, "are more than 6 answers"),
        ({"prompt": "a", "n": 10**30}, "are more than 6 answers"),
        ({"prompt": "a", "stop": ["x" * 257]}, "stop: must be at most 16 texts of at most 256 characters"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop: must be at most 16 texts"),
        ({"prompt": "a", "stop": 3}, "stop: must be at most 16 texts"),
        ({"prompt": "a", "seed": "x"}, "seed: must be a whole number, not 'x'"),
        (
            {"prompt": "a", "logprobs": 2, "echo": True},
            "logprobs: 2 is not supported",
        ),
        ({"messages": [USER]}, "prompt: must be a text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_completion_says_why(served, body, message):
    answered = served.ask(COMPLETIONS, body)
    error = answered.json["error"]
    key = message.partition(":")[0] if ":" in message else "n" if "answers" in message else None
    assert (answered.status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", key, None)
    assert message in error["message"]
    assert served.engine.num_open == 0


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: must be a list of messages"),
        ([], "messages: must be a list of messages"),
        (["a", {"content": "a"}], "messages[0]: must be a message with a role"),
        ([{"role": "bot", "content": "a"}], "messages[0].role: 'bot' is not known"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "x"}}]}], "messages[1].tool_calls[0].function.arguments: "),
        ([USER, {"role": "user", "content": 3}], "messages[1].content: must be a text or a list of parts with texts, not 3"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content: must be a text or"),
    ],
)
def test_a_wrong_chat_says_why(served, messages, message):
    answered = served.ask(CHATS, {"messages": messages, "tools": [], "parallel_tool_calls": True, "response_format": {"type": "text"}})
    assert answered.status == 400 and message in answered.json["error"]["message"]


def test_other_errors_have_the_same_form(served):
    def status(path, body=None, **options):
        answered = served.ask(path, body, **options)
        return answered.status, answered.json["error"]["message"]

    assert status("/v1/nothing") == (
        404,
        "unknown path '/v1/nothing'. Known: /health, /metrics, /v1/models, /v1/completions, /v1/chat/completions. "
        "A client's base_url ends with /v1",
    )
    assert status("/v1/models/org/gpt-4") == (404, "the model 'org/gpt-4' is not served here. There is: 'parrot'")
    assert status(COMPLETIONS) == (405, "Method Not Allowed")
    assert status(COMPLETIONS, {"prompt": "a", "model": "gpt-4"}) == (404, "the model 'gpt-4' is not served here. There is: 'parrot'")
    assert status(COMPLETIONS, {"prompt": "a"}, headers={"content-type": "text/plain"})[0] == 415
    assert status(COMPLETIONS, b" " * (65_537 + 32 * LONGEST))[0] == 413
    for host in ("evil.example:8000", "", "[::1", "localhost.evil.example"):
        assert status(COMPLETIONS, {"prompt": "a"}, headers={"host": host})[0] == 403
    for host in ("[::1]:8000", "127.0.0.1", "localhost"):
        assert served.ask(COMPLETIONS, {"prompt": "a"}, headers={"host": host}).status == 200


def test_a_body_that_does_not_arrive(served, monkeypatch):
    monkeypatch.setattr(app_file, "_BODY_SECONDS", 0.02)
    answered = served.ask(COMPLETIONS, {"prompt": "a"}, waits=0.5)
    assert (answered.status, answered.headers["connection"]) == (408, "close")


def test_with_a_token_only_who_has_it_is_answered():
    served = Served(token=b"s\xc3\xa9cret")
    try:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "s\xc3\xa9cret"}):
            answered = served.ask("/v1/models", headers=headers)
            assert answered.status == 401 and "the API key is wrong or missing" in answered.json["error"]["message"]
        right = {"authorization": "Bearer s\xc3\xa9cret", "host": "example.com"}
        assert served.ask("/v1/models", headers=right).status == 200
        assert served.ask("/v1/models", headers={**right, "authorization": "bearer s\xc3\xa9cret"}).status == 200
        assert served.ask(COMPLETIONS, {"prompt": "a"}, headers=right).status == 200
        assert served.ask("/health", headers={"host": "example.com"}).status == 200
    finally:
        served.engine.stop()
        served.engine.join()


# -- requests together --------------------------------------------------------------------------------------------------


def test_requests_join_those_that_are_answered_and_the_next_are_refused(served):
    async def trial():
        served.batch.goes.clear()
        asked = []
        for n in range(1 + WAITING):
            asked.append(asyncio.create_task(ask(served.app, COMPLETIONS, {"prompt": f"{n:2}", "max_tokens": 9})))
            # The first one has a row before the others come.
            await until(lambda n=n: served.engine.num_open == n + 1 and served.batch.rows)
        refused = await ask(served.app, COMPLETIONS, {"prompt": "x"})
        served.batch.goes.set()
        return [answered.json["choices"][0]["text"] for answered in await asyncio.gather(*asked)], refused

    texts, refused = asyncio.run(trial())
    assert texts == [(f"{n:2}" * 5)[:9] for n in range(1 + WAITING)]
    assert (refused.status, refused.headers["retry-after"], refused.json["error"]["code"]) == (503, "1", "overloaded")


@pytest.mark.parametrize("streams", [True, False])
def test_the_row_of_a_client_that_leaves_is_free(served, streams):
    async def trial():
        leaves = asyncio.Event()
        body = {"prompt": "ab", "max_tokens": 10**9, "stream": streams}
        # One more than there are rows, which waits.
        asked = [asyncio.create_task(ask(served.app, COMPLETIONS, body, leaves=leaves)) for _ in range(ROWS + 1)]
        await until(lambda: served.engine.num_open == ROWS + 1 and served.batch.num_free == 0)
        leaves.set()
        await asyncio.gather(*asked)
        await until(lambda: served.engine.num_open == 0 and served.batch.num_free == ROWS)
        return await ask(served.app, COMPLETIONS, {"prompt": "ab"})

    assert asyncio.run(trial()).status == 200


def test_when_the_server_ends_so_do_answers(served):
    async def trial():
        bodies = [{"prompt": "ab", "max_tokens": 10**9, "stream": streams} for streams in (True, False)]
        asked = [asyncio.create_task(ask(served.app, COMPLETIONS, body)) for body in bodies]
        await until(lambda: served.batch.num_free == 0)
        served.engine.stop()
        return [*(await asyncio.gather(*asked)), await ask(served.app, COMPLETIONS, bodies[0])]

    streamed, whole, late = asyncio.run(trial())
    assert (streamed.status, json.loads(streamed.events[-1])["error"]["message"]) == (200, "the server is ending")
    assert (whole.status, late.status) == (503, 503)


def test_a_failure_of_the_model_ends_everything(served):
    served.batch.failure = MemoryError("no memory")
    assert served.ask(COMPLETIONS, {"prompt": "ab"}).status == 503
    served.engine.join()
    assert served.engine.error is served.batch.failure
    answered = served.ask("/health")
    assert (answered.status, answered.json["status"]) == (500, "failed")
