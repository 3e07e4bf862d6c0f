"""`jgt serve` in its own process: OpenAI's client, clients that leave, and 300 that are malformed, huge or slow."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

import jgt
from train.run.train import train

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OVERRIDES = ["model.seq=1024", "generate.batch=4", "generate.temperature=0"]
PROMPTS = [("abc", "1 4 9 16", "zzz " * 9, "Ü")[n % 4] + str(n) for n in range(16)]


@pytest.fixture(scope="module")
def folder(tiny_file, tmp_path_factory, pytestconfig):
    """A run whose tokenizer has a chat template."""
    from train.config import load

    path = tmp_path_factory.mktemp("served")
    golden = pytestconfig.rootpath / "tests" / "goldens" / "tokenizers" / "byte_level"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((golden / name).read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    keys = [
        f"run.dir={path / 'run'}",
        f"data.tokenizer={path / 'tokenizer.json'}",
        "model.vocab=320",
        "train.steps=60",
        "optimizer.lr=0.01",
    ]
    train(load(tiny_file, keys))
    return path / "run"


class Server:
    """The process and its address."""

    def __init__(self, folder, *flags):
        command = [sys.executable, "-m", "jgt", "serve", str(folder), *OVERRIDES, "--port", "0", "--quiet", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
        self.line = self.process.stdout.readline()
        self.url = re.search(r"http://\S+/v1", self.line)[0]
        self.port = int(re.search(r":(\d+)/", self.url)[1])
        self.info = psutil.Process(self.process.pid)

    def client(self, **options):
        return openai.OpenAI(base_url=self.url, api_key="none", **options)

    def num_open(self):
        with urlopen(self.url.replace("/v1", "/health")) as answer:
            return json.load(answer)["open"]

    def end(self, number):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        # A machine that is busy compiles for seconds.
        lines = [line for line in err.splitlines() if not line.startswith("jgt serve: compiling ")]
        return self.process.returncode, out, "\n".join(lines)


@pytest.fixture(scope="module")
def server(folder):
    made = Server(folder)
    yield made
    assert made.end(signal.SIGINT) == (0, "", "")


@pytest.fixture(scope="module")
def loaded(folder):
    return jgt.load(folder, OVERRIDES)


def test_the_line_at_the_start(server, folder):
    assert server.line == f"{server.url} serves run, 4 answers at a time. Ctrl-C ends it\n"
    assert [model.id for model in server.client().models.list()] == ["run"]


def streamed(client, prompt, tokens):
    chunks = client.completions.create(model="run", prompt=prompt, max_tokens=tokens, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_sixteen_at_once_have_the_texts_of_generate(server, loaded):
    expected = [answer.text for answer in loaded.generate(PROMPTS, tokens=40)]
    with server.client(max_retries=0) as client, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda prompt: streamed(client, prompt, 40), PROMPTS)) == expected
        whole = pool.map(lambda prompt: client.completions.create(model="run", prompt=prompt, max_tokens=40), PROMPTS)
        assert [made.choices[0].text for made in whole] == expected
        made = client.completions.create(model="run", prompt=PROMPTS, max_tokens=40)
        assert [choice.text for choice in made.choices] == expected
    assert len(set(expected)) > 1


def test_a_chat_has_the_prompt_of_the_template(server, loaded):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "12 + 34"}]
    prompt = loaded.tokenizer.encode("<system>s</system><user>12 + 34</user><assistant>")
    (expected,) = loaded.generate([prompt], tokens=20)
    with server.client() as client:
        made = client.chat.completions.create(model="run", messages=messages, max_tokens=20)
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == (expected.text, expected.reason)
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), len(expected.tokens))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(model="run", messages=messages, max_completion_tokens=20, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
        assert last.usage == made.usage


def test_draws_are_those_of_generate(server, loaded):
    given = {"temperature": 1.0, "top_p": 0.9}
    expected = loaded.generate(["abc"], tokens=20, seed=7, samples=3, **given)
    with server.client() as client:
        made = client.completions.create(model="run", prompt="abc", max_tokens=20, seed=7, n=3, **given)
    assert [choice.text for choice in made.choices] == [answer.text for answer in expected]


def test_errors_are_the_clients_own(server):
    with server.client(max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match=r"temperature: -1.0 is too small"):
            client.completions.create(model="run", prompt="a", temperature=-1)
        with pytest.raises(openai.BadRequestError, match=r"the prompt has .* tokens, and model.seq 1,024"):
            client.completions.create(model="run", prompt="a" * 2000)
        with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served here"):
            client.completions.create(model="gpt", prompt="a")


def test_clients_that_leave_free_their_rows(server):
    with server.client() as client, contextlib.ExitStack() as stack:
        streams = [client.completions.create(model="run", prompt="a", max_tokens=1000, stream=True) for _ in range(4)]
        # All rows are taken, so these wait.
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(4)]
        for one in waiting:
            one.sendall(prompt(max_tokens=1000))
        wait_for(lambda: server.num_open() == 8)
        next(iter(streams[0]))
        for one in (*streams, *waiting):
            one.close()
        wait_for(lambda: server.num_open() == 0)
        assert streamed(client, "a", 3)


def wait_for(condition):
    """Waits until a condition holds, at most two seconds."""
    end = time.monotonic() + 2
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_for_others_needs_a_token(folder):
    command = [sys.executable, "-m", "jgt", "serve", str(folder), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (2, "") and "Add --token TOKEN" in done.stderr
    made = Server(folder, "--host", "0.0.0.0", "--token", "secret")
    with pytest.raises(openai.AuthenticationError):
        made.client().models.list()
    assert list(openai.OpenAI(base_url=made.url, api_key="secret").models.list())
    # While an answer is written.
    stream = openai.OpenAI(base_url=made.url, api_key="secret").completions.create(model="run", prompt="a", max_tokens=999, stream=True)
    next(iter(stream))
    assert made.end(signal.SIGTERM) == (0, "", "")


def test_a_port_that_is_taken(server, folder):
    command = [sys.executable, "-m", "jgt", "serve", str(folder), "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"command line: cannot listen: Address already in use.*\. Choose another --host or --port\n", done.stderr)


# -- 300 hostile clients ------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request(body, head=HEAD):
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def prompt(**keys):
    return request(json.dumps({"prompt": "a", **keys}).encode())


KINDS = {
    "noise": os.urandom(4_000),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half a head": HEAD,
    "half a body": HEAD + b'Content-Length: 4000\r\n\r\n{"prompt": "a',
    "a huge head": HEAD + b"X: " + b"a" * 2_000_000,
    "many heads": HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(50_000)),
    "a huge body": request(b" " * 20_000_000),
    "a false length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n{}",
    "endless chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"5\r\n     \r\n" * 50_000,
    "a false chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "deep JSON": request(b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}"),
    "large numbers": request(b'{"prompt": "a", "n": ' + b"9" * 40_000 + b"}"),
    "surrogates": request(b'{"prompt": "\\ud800\\udfff\\ud800"}'),
    "a long prompt": prompt(prompt="1 2 " * 20_000),
    "a prompt that just fits": prompt(prompt="1 2 " * 240, max_tokens=10),
    "long stops": prompt(stop=["a" * 256] * 16, max_tokens=10),
    "many prompts": request(json.dumps({"prompt": ["a"] * 20_000}).encode()),
    "keys": request(json.dumps({f"k{n}": n + 1 for n in range(5_000)}).encode()),
    "leaves": prompt(max_tokens=1000),
    "leaves a stream": prompt(max_tokens=1000, stream=True),
    "does not read": prompt(max_tokens=1000, stream=True, n=2),
    "pipelined": prompt(max_tokens=1) * 40,
}
STAYS = {"nothing", "half a line", "half a head", "half a body", "does not read", "a huge head"}
BYTEWISE = {"half a head", "half a body"}


def be_hostile(port, kind, seconds):
    """Sends bytes, in some kinds one at a time, and leaves at once, or stays until it is sent away."""
    with contextlib.suppress(OSError), socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        made.settimeout(seconds)
        made.connect(("127.0.0.1", port))
        data, end = KINDS[kind], time.monotonic() + seconds
        if kind in BYTEWISE:
            for n in range(len(data)):
                made.sendall(data[n : n + 1])
                time.sleep(0.02)
        else:
            made.sendall(data)
        if kind == "does not read":
            time.sleep(seconds)
        elif kind in STAYS:
            while made.recv(4_096) and time.monotonic() < end:
                pass
        elif not kind.startswith("leaves"):
            made.settimeout(3)
            made.recv(100_000)


FRIENDLY = """
import json, sys, threading, time
from openai import OpenAI

over, delays = threading.Event(), []
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=30)
while not over.is_set():
    began = time.monotonic()
    for _ in client.completions.create(model="run", prompt="abc", max_tokens=8, stream=True):
        delays.append(time.monotonic() - began)
        began = time.monotonic()
print(json.dumps([len(delays), max(delays)]))
"""
"""A client in its own process, which tells how long it has waited for each piece at most."""


def attack(port, seconds):
    """All hostile clients, 60 at a time."""
    kinds = [list(KINDS)[n % len(KINDS)] for n in range(300)]
    random.Random(0).shuffle(kinds)
    with ThreadPoolExecutor(60) as pool:
        list(pool.map(lambda kind: be_hostile(port, kind, seconds), kinds))


@pytest.fixture
def large(folder):
    """A server with rows for all, since a client that waits for a row is not harmed by others that are answered."""
    made = Server(folder, "generate.batch=32")
    yield made
    made.process.kill()
    made.process.communicate()


def test_three_hundred_hostile_clients_harm_nobody(large):
    server = large

    def sizes():
        with server.info.oneshot():
            return server.info.memory_info().rss / 1e6, server.info.num_fds(), server.info.num_threads()

    def rest():
        end = time.monotonic() + 30
        while server.num_open() or sizes()[1] > 20:
            assert time.monotonic() < end, (server.num_open(), sizes())
            time.sleep(0.2)
        return sizes()

    # The first ones let programs be compiled for all lengths, and the heap grow to the size that it needs.
    for _ in range(2):
        attack(server.port, 3)
    before = rest()
    client = subprocess.Popen([sys.executable, "-c", FRIENDLY, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    attack(server.port, 25)
    count, longest = json.loads(client.communicate("")[0])
    after = rest()
    print(f"\nRSS, descriptors, threads: {before} -> {after}; {count} pieces, the longest wait {longest:.2f} s")
    assert after[0] - before[0] < 50 and after[1] <= before[1] + 2 and after[2] <= before[2] + 4
    assert count > 100 and longest < 2
    assert server.end(signal.SIGINT) == (0, "", "")
