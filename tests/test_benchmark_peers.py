"""Comparisons with other programs measure the same thing on both sides, or fail."""

import pytest

from benchmarks import peers
from benchmarks.harness import FailedError, Sample

COMMANDS = {"jgt": ["python", "a b"], "peer": ["python", "c"]}


def test_models_of_different_size_are_not_compared():
    same = {side: [{"parameters": 12, "versions": {"jax": "1"}}] for side in COMMANDS}
    assert peers.alike(same, COMMANDS) == {
        "parameters": 12,
        "versions": {side: {"jax": "1"} for side in COMMANDS},
        "commands": {"jgt": "python 'a b'", "peer": "python c"},
    }
    with pytest.raises(FailedError, match=r"the models differ, parameters: .*'peer': 13"):
        peers.alike(same | {"peer": [{"parameters": 13, "versions": {}}]}, COMMANDS)


def test_processes_take_turns_and_know_when_they_were_launched(monkeypatch):
    launched = []

    def run(command, environment):
        launched.append((command[1], float(environment["LAUNCHED"])))
        return Sample(s=1.0, cpu_s=1.0, found={"of": command[1]})

    monkeypatch.setattr(peers, "run_process", run)
    found = peers.in_turn(COMMANDS, rounds=2)
    assert [name for name, _ in launched] == ["a b", "c", "c", "a b"]
    assert [at for _, at in launched] == sorted(at for _, at in launched)
    assert found == {"jgt": [{"of": "a b"}] * 2, "peer": [{"of": "c"}] * 2}


@pytest.mark.parametrize(
    ("arguments", "said"), [(["flax"], "flax: no peer"), (["maxtext"], "--maxtext PYTHON"), (["levanter"], "name one: --levanter PYTHON")]
)
def test_what_cannot_run_is_said_at_once(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(peers, "LEVANTER_PYTHON", (99, 0))
    monkeypatch.setattr("sys.argv", ["peers.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        peers.main()
    assert said in capsys.readouterr().err
