"""The facts about JAX's own cache that train/processes/compiled.py relies on, for each supported version of JAX."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache, compiler, distributed
from jax._src.compilation_cache_interface import CacheInterface

from train.processes.compiled import ENDING, TRIAL, Programs, finish_trial, open_programs, programs_on_trial, use_programs

# A trial is open as long as its process lives, unless a step is finished.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def programs(tmp_path):
    """Programs in an empty folder, which JAX uses until the end of the test."""
    before = jax.config.jax_compilation_cache_dir
    found = open_programs(tmp_path)
    assert use_programs(found)
    yield found
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def compute(factor=3):
    """A program that JAX compiles, or takes from its cache."""

    def three_times(x):
        return factor * x + 1

    return jax.jit(three_times)(jnp.arange(4.0)).tolist()


def stored(programs):
    return [path for path in programs.folder.iterdir() if path.name.startswith("jit_three_times-")]


def test_jax_asks_its_cache_by_these_methods():
    assert CacheInterface.__abstractmethods__ == {"get", "put"}
    for name in ("get", "put"):
        ours, jaxs = (inspect.signature(getattr(kind, name)).parameters for kind in (Programs, CacheInterface))
        assert list(ours) == list(jaxs)


def test_jax_stores_a_program_and_loads_it(programs, monkeypatch):
    loaded, plain = [], programs.get
    monkeypatch.setattr(programs, "get", lambda key: loaded.append((key, plain(key))) or loaded[-1][1])
    assert compute() == [1, 4, 7, 10]
    (path,) = stored(programs)
    assert path.name.endswith(ENDING)
    assert [found for key, found in loaded if key.startswith("jit_three_times")] == [None]
    loaded.clear()
    # Compiled again, and not taken from memory: the function is another object.
    assert compute() == [1, 4, 7, 10]
    assert [found is not None for key, found in loaded if key.startswith("jit_three_times")] == [True]


def test_jax_runs_what_the_cache_returns_and_compiles_what_it_refuses(programs, capsys):
    """Without the first half, the second would prove nothing."""
    compute(3), compute(5)
    three, five = sorted(stored(programs), key=lambda path: path.stat().st_mtime_ns)
    keys = [path.name.removesuffix(ENDING) for path in (three, five)]
    right = programs.get(keys[0])
    programs.put(keys[0], programs.get(keys[1]))
    assert compute(3) == [1, 6, 11, 16], "a wrong program runs unnoticed"
    programs.put(keys[0], right)
    three.write_bytes(five.read_bytes())
    assert compute(3) == [1, 4, 7, 10]
    assert f"jgt: the compiled program {three} is damaged: its checksum differs" in capsys.readouterr().err
    assert compute(3) == [1, 4, 7, 10]
    assert capsys.readouterr().err == ""


class Second:
    """The backend of a second process: a CPU's, and this process's in everything else."""

    platform = "cpu"

    def __init__(self, backend):
        self._backend = backend

    def process_index(self):
        return 1

    def __getattr__(self, name):
        return getattr(self._backend, name)


def test_each_process_stores_what_it_compiles_for_a_cpu(programs, monkeypatch):
    written, write = [], compiler._cache_write

    def in_second(key, seconds, name, backend, *more):
        written.append(key)
        write(key, seconds, name, Second(backend), *more)

    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    compute()
    assert not stored(programs), "JAX alone writes in the first process only"
    monkeypatch.setattr(compiler, "_cache_write", in_second)
    assert compute() == [1, 4, 7, 10]
    assert len(stored(programs)) == 1 and written
    written.clear()
    assert compute() == [1, 4, 7, 10]
    assert not written


def trials(programs):
    return len(list(programs.folder.glob(f"*{TRIAL}")))


def test_a_trial_ends_with_a_step_or_with_the_block(programs):
    compute(), compute()
    assert trials(programs) > 0
    finish_trial()
    assert trials(programs) == 0
    with programs_on_trial():
        compute()
        assert trials(programs) > 0
    assert trials(programs) == 0
    with pytest.raises(KeyError), programs_on_trial():
        compute()
        raise KeyError
    assert trials(programs) == 0
    with pytest.raises(jax.errors.JaxRuntimeError), programs_on_trial():
        compute()
        raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel")
    assert trials(programs) > 0


def test_without_a_cache_there_is_nothing_to_end():
    finish_trial()
    with programs_on_trial():
        pass


@pytest.mark.parametrize("name", ["reset_cache", "_cache_initialized_mutex", "_get_cache"])
def test_a_jax_that_works_in_another_way_stores_nothing(name, programs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(compilation_cache, name)
        assert not use_programs(programs)
        assert jax.config.jax_compilation_cache_dir is None
    with monkeypatch.context() as patch:
        patch.setattr(compilation_cache, "_get_cache", lambda backend: None)
        assert not use_programs(programs)


def test_an_empty_default_is_left_as_it_was(programs):
    compilation_cache.reset_cache()
    assert compilation_cache._cache is None
    finish_trial()
