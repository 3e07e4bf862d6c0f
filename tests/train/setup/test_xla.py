"""XLA's flags, which are tried before they are used, and the cache of compiled programs."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jgt.document import InputError
from jgt.pipeline.config import PipelineConfig
from jgt.planner.hardware.target import USABLE
from train.config.config import Config
from train.models.config import ModelConfig
from train.processes.compiled import Programs
from train.settings.sections import DevicesConfig, XlaConfig
from train.setup import xla
from train.setup.xla import PRESETS, configure_xla
from train.step.sync.config import SyncConfig

GOOD, UNKNOWN = "xla_gpu_enable_latency_hiding_scheduler", "xla_no_such_flag"


def config_of(*, fp8=False, pipeline=None, virtual_cpu=1, sync=None, **options):
    """The config of a run with this `xla:` section."""
    sections = {"model": ModelConfig(fp8=fp8), "devices": DevicesConfig(virtual_cpu=virtual_cpu), "xla": XlaConfig(**options)}
    return Config(pipeline=pipeline, sync=sync, **sections)


@pytest.fixture
def flags(monkeypatch):
    """Configures XLA with the given XLA_FLAGS. Returns the flags afterwards, and the warnings."""

    def _flags(config, given=""):
        monkeypatch.setenv("XLA_FLAGS", given)
        warnings = configure_xla(config)
        return os.environ["XLA_FLAGS"].split(), warnings

    return _flags


@pytest.fixture
def updates(monkeypatch):
    """The options that are set in JAX's configuration."""
    found = {}
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", found.__setitem__)
        yield found
    compilation_cache.reset_cache()


def test_flags_are_set_and_unknown_ones_left_out(flags):
    found, warnings = flags(config_of(cache=None, flags={GOOD: True, f"--{UNKNOWN}": 3, "xla_cpu_enable_fast_math": "perhaps"}))
    assert found == [f"--{GOOD}=true"]
    assert warnings == [
        f"this XLA does not accept --{UNKNOWN}=3; it is left out",
        "this XLA does not accept --xla_cpu_enable_fast_math=perhaps; it is left out",
    ]


def test_what_is_known_is_tried_once_with_each_jaxlib(flags, updates, monkeypatch, tmp_path):
    config, tried = config_of(cache=str(tmp_path), flags={GOOD: True, UNKNOWN: 3}), []
    monkeypatch.setattr(xla, "_is_accepted", lambda flags: tried.append(flags) or not any(UNKNOWN in flag for flag in flags))
    first = flags(config)
    assert first == ([f"--{GOOD}=true"], [f"this XLA does not accept --{UNKNOWN}=3; it is left out"])
    assert len(tried) == 3
    assert flags(config) == first
    assert len(tried) == 3
    monkeypatch.setattr(xla.metadata, "version", lambda name: "another")
    assert flags(config) == first
    assert len(tried) == 6


def test_the_environment_wins(flags):
    found, warnings = flags(config_of(cache=None, flags={GOOD: True}), given=f"--{GOOD}=false --xla_dump_to=x")
    assert (found, warnings) == ([f"--{GOOD}=false", "--xla_dump_to=x"], [])


@pytest.mark.parametrize("former", ["xla_gpu_enable_pipelined_all_gather", "xla_gpu_pipeline_all_gather"])
def test_the_environment_wins_under_either_name_of_a_flag(former, flags):
    found, warnings = flags(config_of(cache=None, preset="gpu-overlap"), given=f"--{former}=off")
    assert not warnings
    assert [flag for flag in found if "all_gather=" in flag] == [f"--{former}=off"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_known(name, flags):
    found, warnings = flags(config_of(cache=None, preset=name))
    assert warnings == []
    assert found == [f"--{flag}={value}" for flag, value in PRESETS[name].items()]


@pytest.mark.parametrize(
    ("wire", "virtual_cpu", "given", "expected"),
    [("int8", 1_000, None, "2000"), ("int8", 1_000, "5", "5"), ("int8", None, None, None), ("f32", 1_000, None, None)],
)
def test_virtual_devices_that_exchange_int8_get_more_threads(flags, monkeypatch, wire, virtual_cpu, given, expected):
    monkeypatch.delenv("NPROC", raising=False)
    if given is not None:
        monkeypatch.setenv("NPROC", given)
    try:
        flags(config_of(cache=None, virtual_cpu=virtual_cpu, sync=SyncConfig(axis="replica", wire=wire)))
        assert os.environ.get("NPROC") == expected
    finally:
        os.environ.pop("NPROC", None)


PIPELINE, FP8 = PipelineConfig(signal="layers", microbatches=2), {"xla_gpu_enable_triton_gemm": "false"}


@pytest.mark.parametrize(("gpus", "virtual_cpu", "has_gpu"), [(["nvidia0"], None, True), (["nvidia0"], 1, False), ([], None, False)])
@pytest.mark.parametrize(
    ("preset", "fp8", "pipeline", "expected"),
    [
        ("auto", False, None, PRESETS["gpu-overlap"]),
        ("auto", True, None, PRESETS["gpu-fp8"]),
        ("auto", False, PIPELINE, PRESETS["gpu-pipeline"]),
        ("auto", True, PIPELINE, PRESETS["gpu-pipeline"] | FP8),
        ("none", True, PIPELINE, {}),
    ],
)
def test_a_preset_for_the_devices_here(gpus, virtual_cpu, has_gpu, preset, fp8, pipeline, expected, monkeypatch):
    monkeypatch.setattr(xla.Path, "glob", lambda self, pattern: gpus)
    monkeypatch.setattr(xla, "_accepted_flags", lambda flags, folder: flags)
    monkeypatch.setenv("XLA_FLAGS", "")
    # As one of a user's, so that this test leaves none behind.
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.75")
    configure_xla(config_of(cache=None, preset=preset, virtual_cpu=virtual_cpu, fp8=fp8, pipeline=pipeline))
    assert xla.os.environ["XLA_FLAGS"].split() == [f"--{flag}={value}" for flag, value in expected.items() if has_gpu]


@pytest.mark.parametrize(
    ("gpus", "virtual_cpu", "given", "expected"),
    [
        (["nvidia0"], None, {}, {"XLA_CLIENT_MEM_FRACTION": str(USABLE)}),
        (["nvidia0"], None, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        (["nvidia0"], None, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}),
        (["nvidia0"], 1, {}, {}),
        ([], None, {}, {}),
    ],
)
def test_the_share_of_a_gpus_memory_is_that_of_plans(gpus, virtual_cpu, given, expected, monkeypatch):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    # Sets each first, so that the end of the test removes what the function has set.
    for name in names:
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(xla.Path, "glob", lambda self, pattern: gpus)
    configure_xla(config_of(cache=None, preset="none", virtual_cpu=virtual_cpu))
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def test_the_presets_differ_in_these_flags():
    overlap, pipelined = PRESETS["gpu-overlap"], PRESETS["gpu-pipeline"]
    assert overlap.items() - pipelined.items() == {
        ("xla_gpu_enable_pipelined_all_gather", "true"),
        ("xla_gpu_enable_while_loop_double_buffering", "true"),
        ("xla_gpu_experimental_parallel_collective_overlap_limit", "2"),
    }
    assert pipelined.items() < overlap.items()
    assert PRESETS["gpu-fp8"] == overlap | FP8


def test_the_flags_of_a_plan_are_those_of_the_run(flags):
    flags(config_of(cache=None, preset="none"), given=f"--{GOOD}=false")
    planned, warnings = xla.planned_flags(config_of(flags={GOOD: True, "xla_no_such_flag": 1}), has_gpu=True)
    assert planned == {name: value for name, value in PRESETS["gpu-overlap"].items() if name != GOOD}
    assert warnings == ["this XLA does not accept --xla_no_such_flag=1; it is left out"]


def test_names_that_cannot_be_xlas(tiny):
    with pytest.raises(InputError, match=r"xla.flags.foo: is not an XLA flag. Write xla_NAME: VALUE"):
        tiny("xla.flags={foo: 3}")
    with pytest.raises(InputError, match="is not an XLA flag"):
        tiny("xla.flags={xla_foo: 'a --xla_bar=1'}")


def test_programs_are_kept_in_the_users_cache_folder(flags, updates, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags(config_of())
    (folder,) = (tmp_path / "jgt" / "compiled").iterdir()
    assert updates["jax_compilation_cache_dir"] == str(folder)
    flags(config_of(cache=str(tmp_path / "own")))
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "own")
    updates.clear()
    flags(config_of(cache=None))
    assert updates == {}


def test_a_cache_that_a_file_names_has_only_programs_of_this_user(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(xla, "use_programs", lambda programs: opened.append(programs) or True)

    def programs(user, *, is_from_file=True):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / user))
        assert configure_xla(config_of(cache=str(tmp_path / "shared"), preset="none"), is_from_file=is_from_file) == []
        return opened[-1]

    mine, stranger = programs("me"), programs("stranger")
    mine.put("jit_f", b"mine")
    stranger.put("jit_f", b"theirs")
    assert programs("me").get("jit_f") == b"mine"
    # One who knows the name of the folder has no key for its programs.
    for forger in (stranger, Programs(tmp_path / "shared")):
        forger.folder = mine.folder
        forger.put("jit_f", b"theirs")
        assert programs("me").get("jit_f") is None
    assert programs("me", is_from_file=False).folder == tmp_path / "shared"
    key = tmp_path / "me" / "jgt" / "compiled" / "key"
    assert key.stat().st_mode & 0o077 == 0 and len(key.read_bytes()) == 32


@pytest.mark.parametrize("name", ["a.txt", "a.txt/b", "a" * 300])
def test_a_cache_that_cannot_be_is_told(tmp_path, updates, name):
    (tmp_path / "a.txt").touch()
    (warning,) = configure_xla(config_of(cache=str(tmp_path / name)))
    assert warning.startswith(f"compiled programs cannot be stored in {tmp_path}")
    assert updates == {}


def test_a_user_without_a_home_has_no_cache(updates, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert configure_xla(config_of()) == [
        "compiled programs cannot be stored, because this user has no home folder. Every start compiles again. Set HOME or xla.cache"
    ]
    assert updates == {}


@pytest.mark.parametrize("harm", ["pipe", "folder", "flip"])
def test_a_stored_answer_that_is_harmed_is_asked_for_again(harm, flags, updates, tmp_path):
    config = config_of(cache=str(tmp_path), flags={GOOD: True})
    first = flags(config)
    (note,) = tmp_path.glob("flags-*")
    text = note.read_bytes()
    note.unlink()
    if harm == "pipe":
        os.mkfifo(note)
    elif harm == "folder":
        note.mkdir()
    else:
        note.write_bytes(text.replace(b"latency", b"mystery"))
    assert flags(config) == first


def test_a_jax_with_another_cache_has_none(updates, monkeypatch, tmp_path):
    monkeypatch.setattr(xla, "use_programs", lambda programs: False)
    assert configure_xla(config_of(cache=str(tmp_path))) == [
        "compiled programs are not stored, because they cannot be checked with this version of JAX. Every start compiles again"
    ]
