"""Time to an accuracy: which epoch reaches it, when that epoch ended, and which rounds count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.report.learning import SHARE, ends_of_epochs_s, learning, seconds_to
from bench.report.text import to_text
from bench.rounds.record import Round, Task
from bench_rounds import case, finished, outcome

# Three epochs of four steps. The first two steps of all are the warm-up.
DIGITS = Task("digits", 32, 8, warm_up=2, epochs=3)


def trained(system: str, step_s: float, accuracy: list[float], number: int = 0) -> Round:
    return finished(
        case(system, task=DIGITS), *[step_s] * 10, number=number, accuracy=accuracy, loss=[1.0] * 3
    )


def test_epochs_end_after_their_steps_and_the_warm_up() -> None:
    assert ends_of_epochs_s(trained("hvpipe-step", 0.5, [0.1, 0.2, 0.3])) == pytest.approx([2.0, 4.0, 6.0])


def test_the_first_epoch_that_reaches_the_target_counts() -> None:
    round_ = trained("hvpipe-step", 0.5, [0.1, 0.8, 0.7])
    assert seconds_to(round_, 0.75) == pytest.approx(4.0)
    assert seconds_to(round_, 0.9) is None


def test_a_system_that_is_not_exact_may_reach_the_target_in_more_epochs() -> None:
    longer = replace(DIGITS, more_epochs=1)
    slow = finished(
        case("hvpipe-local", task=longer), *[0.25] * 14, accuracy=[0.5, 0.6, 0.8, 0.9], loss=[1.0] * 4
    )
    ((_, learned),) = learning(outcome(trained("hvpipe-step", 1.0, [0.5, 0.6, 0.9]), slow)).values()
    assert [(each.system, each.last, each.seconds) for each in learned] == [
        ("hvpipe-local", (0.8,), 4.0),
        ("hvpipe-step", (0.9,), 12.0),
    ]


def test_the_target_follows_exact_training_and_a_miss_in_one_round_counts_as_a_miss() -> None:
    found = outcome(
        trained("horovod-tuned", 1.0, [0.5, 0.9, 0.9]),
        trained("tf-ps", 0.1, [0.2, 0.2, 0.2]),
        trained("hvpipe-step", 0.5, [0.5, 0.9, 0.9]),
        trained("hvpipe-int8", 0.25, [0.5, 0.5, 0.9]),
        trained("hvpipe-int8", 0.25, [0.5, 0.5, 0.8], number=1),
    )
    ((target, learned),) = learning(found).values()
    assert target == pytest.approx(SHARE * 0.9)
    assert [each.system for each in learned if each.reaches] == ["hvpipe-step", "horovod-tuned"]
    assert {each.system: each.describe() for each in learned} == {
        "hvpipe-step": "4 s, one seed",
        "horovod-tuned": "8 s, one seed",
        "tf-ps": "reached in 0 of 1",
        "hvpipe-int8": "reached in 1 of 2",
    }
    shown = [line.split() for line in to_text(found).splitlines() if "one seed" in line]
    assert [(line[0], line[5]) for line in shown] == [("hvpipe-step", "1.00x"), ("horovod-tuned", "2.00x")]


def test_each_seed_has_a_target_of_its_own() -> None:
    lasts = {"hvpipe-step": (0.9, 0.8), "hvpipe-int8": (0.9, 0.79), "hvpipe-bf16": (0.8, 0.9)}
    rounds = [
        trained(system, 1.0, [0.1, 0.2, last], number)
        for system, of_seeds in lasts.items()
        for number, last in enumerate(of_seeds)
    ]
    ((target, learned),) = learning(outcome(*rounds)).values()
    assert target == pytest.approx(SHARE * 0.85)
    assert {each.system: each.reaches for each in learned} == {
        "hvpipe-step": True,
        "hvpipe-int8": True,
        "hvpipe-bf16": False,
    }


def test_without_exact_training_there_is_no_target() -> None:
    assert learning(outcome(trained("hvpipe-stale", 1.0, [0.5, 0.9, 0.9]))) == {}


def test_rounds_have_a_median_and_a_range() -> None:
    rounds = [
        trained("hvpipe-step", step, [0.9, 0.9, 0.9], number) for number, step in enumerate((1.0, 2.0, 4.0))
    ]
    ((_, (found,)),) = learning(outcome(*rounds)).values()
    assert found.describe() == "8 s (4 s to 16 s)"
    assert replace(found, to_target_s=(1.0, None)).seconds == float("inf")
