"""Processes stop together and start alike. The other processes are simulated."""

import numpy as np
import pytest

from jgt.document import InputError
from train.processes.processes import agree_on_input


@pytest.fixture
def others(monkeypatch):
    """Simulates process 0 of several: what each of the others sends is a function of what process 0 sends."""

    def play(*answers):
        monkeypatch.setattr("jax.process_count", lambda: 1 + len(answers))

        def gather(mine):
            return np.stack([mine, *(answer(mine) for answer in answers)])

        monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)

    return play


def test_alone_only_its_own_problems_count():
    agree_on_input([], {"a": 1})
    with pytest.raises(InputError, match="mine"):
        agree_on_input(["mine"])


def test_alike_and_well_is_fine(others):
    others(lambda mine: mine, lambda mine: mine)
    agree_on_input([], {"its config": 1, "its data": 2})


def test_own_problems_are_told_in_full(others):
    others(lambda mine: mine * 0)
    with pytest.raises(InputError, match="mine"):
        agree_on_input(["mine"])


def test_a_problem_elsewhere_stops_this_process_too(others):
    others(lambda mine: mine, lambda mine: mine + np.array([3, 0], np.uint32))
    with pytest.raises(InputError, match="process 0: stopped because of the problems that process 2 reports"):
        agree_on_input([], {"its config": 1})


@pytest.mark.parametrize(("number", "what"), [(1, "its config"), (2, "its data")])
def test_another_config_or_other_data_is_refused_by_name(others, number, what):
    others(lambda mine: mine, lambda mine: mine ^ np.eye(3, dtype=np.uint32)[number])
    with pytest.raises(InputError, match=f"process 0: {what} differs from process 2's. Give all processes the same"):
        agree_on_input([], {"its config": 1, "its data": 2})
