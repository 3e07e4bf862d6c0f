"""The command line of `jgt serve`."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

from jgt import CommandParser
from jgt.document import InputError

from ...files.streams import say
from ...settings.command_line import add_model, read_token, whole_number
from ...settings.packages import is_installed

_PACKAGES = ("starlette", "uvicorn", "jinja2")


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt serve MODEL`. Returns the exit code: 2 if the input is wrong, and stderr says why."""
    return parser().answer(argv, _serve)


def parser() -> CommandParser:
    """The command line of `jgt serve`."""
    made = CommandParser("jgt serve", "Serves a model by the HTTP API of OpenAI, to try it.")
    add_model(made, "generate.batch=16")
    made.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="the address to listen at (127.0.0.1: this machine alone)")
    made.add_argument("--port", type=whole_number(0, 65_535), default=8000, metavar="N", help="the port; 0: any that is free (8000)")
    made.add_argument("--token", metavar="TOKEN", help="the API key of clients; every --host but this machine's own needs one")
    made.add_argument("--token-file", metavar="FILE", help="a file with the API key, which other users of the machine cannot see")
    queue = "the answers that may wait for a row; further ones are refused (64)"
    made.add_argument("--queue", type=whole_number(), default=64, metavar="N", help=queue)
    made.add_argument("--quiet", action="store_true", help="print no line for each request")
    return made


def _serve(arguments: argparse.Namespace) -> None:
    problems: list[str] = []
    if missing := [name for name in _PACKAGES if not is_installed(name)]:
        problems.append(f"command line: jgt serve needs {' and '.join(missing)}. Install what is missing: pip install 'jgt[serve]'")
    token = (arguments.token or "").encode()
    if arguments.token_file is not None:
        token, wrong = read_token(arguments.token_file)
        problems += wrong
    if not (token or _is_local(arguments.host)):
        problems.append(f"command line: --host {arguments.host}: other machines can reach it. Add --token TOKEN, or --token-file FILE")
    if problems:
        raise InputError(problems)
    from ...generate.chat import Chat
    from ...processes.compiled import finish_trial
    from ...run.load import load_writer
    from .api_request import RequestReader
    from .app import Api
    from .engine import Engine
    from .server import Server, open_socket
    from .traffic import Traffic

    with open_socket(arguments.host, arguments.port) as opened:
        loaded = load_writer(arguments.model, arguments.overrides, arguments.code)
        chat = None if loaded.tokenizer is None else Chat.of(loaded.tokenizer, loaded.setup.run.config.data)
        name = Path(arguments.model.removeprefix("hf:")).resolve().name
        generator, rows = loaded.generator, loaded.setup.run.config.generate.batch
        engine = Engine(generator.writer(rows), most_waiting=arguments.queue)
        reader = RequestReader(generator=generator, chat=chat, name=name, most=arguments.queue)
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        note = "" if chat is None or chat.template is not None else "; without a chat template, it continues the texts of messages"
        line = f"http://{host}:{opened.getsockname()[1]}/v1 serves {name}, {rows} answers at a time{note}. Ctrl-C ends it"

        def ready() -> None:
            # The first programs have run, and a server may be killed after days.
            finish_trial()
            print(line, flush=True)

        say(f"compiling the first programs of {name}; later starts find them in the cache", who="jgt serve")
        traffic = Traffic(log=(lambda line: None) if arguments.quiet else Traffic.log)
        api = Api(traffic=traffic, engine=engine, reader=reader, token=token, is_local=_is_local)
        Server(api.app(), engine, ready).serve_at(opened)


def _is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
