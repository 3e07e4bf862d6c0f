# pyright: reportPrivateUsage=false
"""JAX's persistent compilation cache, replaced by `Programs`.

JAX reads and writes its cache through one object with two methods, `get(key)` and `put(key, program)`, where the key names everything
that the program depends on. The object is private, and JAX has no public way to give it another. So this file, and no other, puts its own
object where JAX keeps that one, and then asks JAX for its cache to see that it is the new one. A JAX that works in another way is left
without a cache: compiling again is better than running a program that nobody has checked.

JAX has one cache in a process, so it is also the place that knows which programs are on trial (`trial.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import jax
from jax._src import compilation_cache

from .programs import Programs


class CheckedCache:
    """Has the methods of JAX's `CacheInterface`."""

    def __init__(self, programs: Programs):
        self.programs = programs
        # JAX names it in its log.
        self._path = programs.folder

    def get(self, key: str) -> bytes | None:
        """The program of a key, None if there is none."""
        return self.programs.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Stores the program of a key."""
        self.programs.put(key, value)


def use_programs(programs: Programs) -> bool:
    """Makes JAX store its programs there. Returns whether it does; if not, JAX stores none."""
    # XLA has files of its own below this folder.
    jax.config.update("jax_compilation_cache_dir", str(programs.folder))
    # JAX's default skips programs that compile in under a second. A start has a dozen of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if _replace_cache(CheckedCache(programs)):
        return True
    jax.config.update("jax_compilation_cache_dir", None)
    return False


def finish_trial() -> None:
    """The programs that were loaded have run, or this process ends for a reason that is not theirs."""
    cache = getattr(compilation_cache, "_cache", None)
    if isinstance(cache, CheckedCache):
        cache.programs.trial.end()


@contextlib.contextmanager
def programs_on_trial() -> Iterator[None]:
    """Programs that are loaded inside stay on trial if the process dies there, or if JAX's runtime raises an error."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise
    except BaseException:
        finish_trial()
        raise
    finish_trial()


def _replace_cache(cache: CheckedCache) -> bool:
    # Any error of another JAX means the same.
    try:
        compilation_cache.reset_cache()
        with compilation_cache._cache_initialized_mutex:
            # Through setattr: its type is JAX's own interface.
            setattr(compilation_cache, "_cache", cache)  # noqa: B010
            compilation_cache._cache_initialized = True
        # JAX asks the backend only for the type of its runtime.
        return compilation_cache._get_cache(SimpleNamespace(runtime_type="")) is cache
    except Exception:
        return False
