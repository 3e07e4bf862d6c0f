"""Starts runs quickly: a process that has imported everything and opened nothing forks a child for each run.

    python nursery.py CACHE

reads a JSON line {"arguments": [...], "log": PATH, "environment": {...}} and answers with the PID of a process that runs `train`
with them, in its own session; reads {"wait": PID} and answers with its exit code (negative: the signal that killed it).
"""

import json
import os
import sys
import threading

import jax

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

from train.__main__ import main  # noqa: E402


def run(arguments, log, environment):
    os.setsid()
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    os.close(0)
    code = 1
    try:
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        jax.distributed.shutdown()
    finally:
        os._exit(code)


assert threading.active_count() == 1
for line in sys.stdin:
    command = json.loads(line)
    if "wait" in command:
        print(os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1]), flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        run(**command)
