"""The worker and the search: outcomes are counted, crashes and refusals stop nothing, and what is found is shrunk, grouped and muted."""

import sys

import pytest
from drawn import drawn

from jgt.conformance import search as searches
from jgt.conformance.campaign import Asker, Counts, Crash
from jgt.conformance.classes import Classes, WrongClass, is_hidden
from jgt.conformance.judge import as_is, outcome_of
from jgt.conformance.search import Search
from jgt.conformance.worker import Worker

FORM = "at set"
"""Programs with this form are wrong wherever one of their values is split."""


def is_planted(program):
    return FORM in program.forms and any(any(spec) for spec in program.specs.values())


def planted(programs):
    """Runs programs without a mesh, and adds 1 to the outputs of those with the planted fault. XLA refuses what calls sort."""

    def run(arguments):
        if any("sort" in program.forms for program in programs):
            raise ValueError("refused by the test")
        found = [outcome_of(program, each, as_is) for program, each in zip(programs, arguments, strict=True)]
        return [
            {what: value * 0 + 77 for what, value in each.items()} if is_planted(program) else each
            for program, each in zip(programs, found, strict=True)
        ]

    return run


class InProcess:
    """An asker whose worker is in this process and has programs to draw. crashes: the numbers of the jobs at which it would crash."""

    def __init__(self, programs, crashes=()):
        self.worker, self.cpu, self.jobs, self.crashes = Worker(planted, lambda answer: None), 0.0, 0, crashes
        self.programs = iter(programs)

    def ask(self, job):
        self.jobs += 1
        self.cpu += 1.0
        if self.jobs in self.crashes:
            return Crash(trying={}, reason="exit code -6: Check failed 17")
        if job["do"] != "judge":
            job = {"do": "judge", "programs": [next(self.programs).to_json()], "draws": [0, 1]}
        return self.worker.answer(job)

    def tell(self):
        pass

    def close(self):
        pass


def judged(*programs):
    answer = Worker(planted, lambda answer: None).answer({"do": "judge", "programs": [p.to_json() for p in programs], "draws": [0, 1]})
    return {key: answer[key] for key in ("programs", "right")} | {key: len(answer[key]) for key in ("wrong", "refused", "drawn")}


def test_outcomes_are_counted():
    specs = {"x0": (("a",), ())}
    right, wrong, refused = drawn("x0.at[0].set(1)"), drawn("x0.at[0].set(1)", specs=specs), drawn("jnp.sort(x0)")
    assert judged(right) == {"programs": 1, "right": 1, "wrong": 0, "refused": 0, "drawn": 1}
    assert judged(wrong, right) == {"programs": 2, "right": 1, "wrong": 1, "refused": 0, "drawn": 2}
    assert judged(refused)["refused"] == 1
    counts = Counts()
    counts.take(Crash(trying={}, reason=""))
    assert counts == {"programs": 1, "crashed": 1}


def test_a_bundle_that_is_refused_is_judged_in_halves():
    def run(programs):
        if any(program.specs for program in programs):
            raise ValueError("refused by the test")
        return planted(programs)

    worker = Worker(run, lambda answer: None)
    plain, refused = drawn("jnp.tanh(x0)"), drawn("jnp.tanh(x0)", specs={"x0": (("a",), ())})
    answer = worker._judge_all([plain, plain, refused, plain], [])
    assert (answer["programs"], answer["right"], len(answer["refused"])) == (4, 3, 1)


def test_a_planted_fault_is_found_shrunk_and_muted(monkeypatch):
    split = {"x0": (("a",), ("b",)), "v1": (("b",), ())}
    chain = ["jnp.tanh(x0)", "v0.at[0].set(1)", "v1 * x1"]
    inputs = {"x0": (8, 8), "x1": (8, 8)}
    programs = [drawn(*chain, inputs=inputs, specs=split, mesh=(2, 2), salt=n) for n in range(5)] + [drawn("x0.at[0].set(1)"), drawn("-x0")]
    asker = InProcess(programs, crashes=(2,))
    monkeypatch.setattr(searches, "Asker", lambda knowledge: asker)
    monkeypatch.setattr(Search, "_is_reproduced", lambda self, text: True)
    met = []
    search = Search(5, lambda known, cpu: met.append((known.name, known.program.layout())))
    with pytest.raises(StopIteration):
        search.run(lambda: False)
    (known,) = search.classes
    assert [name for name, _ in met] == ["at set: value, 1 mesh axis"]
    assert (known.program.forms, known.count, known.num_shrunk, known.is_confirmed) == ((FORM,), 4, 3, True)
    assert known.example.count("\n") <= 15 and "x0.at[0].set(1)" in known.example
    assert is_hidden(search.classes.muted, [FORM, "tanh"], 0.9) and not is_hidden(search.classes.muted, ["tanh"], 0.9)
    # The worker died of the second job, which was to confirm the first program.
    assert search.unconfirmed == 1 and sum(counts["wrong"] for counts in search.counts.values()) == 5
    assert sum(counts["programs"] for counts in search.counts.values()) == 7


def test_a_crash_while_drawing_is_counted_by_its_reason(monkeypatch):
    monkeypatch.setattr(searches, "Asker", lambda knowledge: InProcess([drawn("-x0")], crashes=(1,)))
    search = Search(0)
    with pytest.raises(StopIteration):
        search.run(lambda: False)
    assert search.crashes == {"exit code -#: Check failed #": 1}
    assert sum(counts["crashed"] for counts in search.counts.values()) == 1


def found(*codes, layout="a", what="value", **more):
    program = drawn(*codes, specs={"x0": ((layout,), ())}, mesh=(2, 2))
    return WrongClass(program=program, what=what, special=False, one_device=False, **more)


def test_programs_are_grouped_by_their_forms_and_by_what_is_wrong():
    classes = Classes()
    first, is_new = classes.add(found("jnp.cumsum(x0, 0)", error=0.5))
    assert is_new and not classes.add(found("jnp.cumsum(x0, 0)", layout="b", error=2.0))[1]
    classes.add(found("jnp.cumsum(x0, 0)", what="gradient"))
    assert (first.count, first.error) == (2, 2.0) and sorted(each.count for each in classes) == [1, 2]
    longer = found("jnp.cumsum(x0, 0)", "jnp.tanh(v0)")
    assert classes.known(longer) is None
    classes.add(found("jnp.cumsum(x0, 0)"))
    assert classes.known(longer) is first and classes.known(found("jnp.tanh(x0)")) is None
    assert classes.known(found("jnp.cumsum(x0, 0)", what="gradient")) is None
    assert first.name == "cumsum: value, 2 mesh axes"


@pytest.mark.parametrize(
    ("code", "reason"), [("import os; os.abort()", "exit code -6"), ("import time; time.sleep(60)", "no answer in 3 s")]
)
def test_a_worker_that_dies_or_hangs_is_replaced(code, reason, monkeypatch):
    monkeypatch.setattr("jgt.conformance.campaign._PATIENCE", 3)
    asker = Asker()
    asker._command = [sys.executable, "-c", f"input(); print('{{\"trying\": 7}}', flush=True); {code}"]
    for _ in range(2):
        answer = asker.ask({"do": "chain"})
        assert isinstance(answer, Crash) and answer.trying == {"trying": 7} and answer.reason.startswith(reason)
    asker._command = [sys.executable, "-c", "input(); print('{\"cpu\": 1.5}', flush=True); input()"]
    assert asker.ask({"do": "chain"}) == {"cpu": 1.5} and asker.cpu == 1.5
    asker.close()
    assert asker.cpu == 1.5
