"""The output in the terminal."""

from train.records.console import Screen


def test_a_step_is_a_line_without_what_is_not_known(capsys):
    screen = Screen(enabled=True)
    metrics = {"loss": 2.0, "grad_norm": 1.5, "lr": 3e-4, "step_time_s": 0.25, "tokens_per_s": 12345.6, "mfu": None}
    screen.step(3, 100, metrics)
    screen.step(100, 100, {"eval_loss": 2.0, "mfu": 0.415})
    assert capsys.readouterr().out.splitlines() == [
        "step   3/100  loss 2.0000  grad_norm 1.5000  lr 3.00e-04  250 ms  12,346 tokens/s",
        "step 100/100  eval_loss 2.0000  mfu 41.5%",
    ]


def test_markup_in_names_and_long_lines_are_printed_as_they_are(capsys):
    screen = Screen(enabled=True)
    screen.say("[red]" + "x" * 500)
    screen.table("T", ["name", "count"], [["[bold]a", "1"], ["b", "22"]], numbers=1)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "[red]" + "x" * 500,
        "T",
        "name     count",
        "[bold]a      1",
        "b           22",
    ]


def test_other_processes_say_nothing(capsys):
    screen = Screen(enabled=False)
    screen.say("x")
    screen.start_steps(0, 3)
    screen.step(1, 3, {"loss": 1.0})
    screen.stop_steps()
    assert capsys.readouterr().out == ""
