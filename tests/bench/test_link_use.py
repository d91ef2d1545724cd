"""How evenly a link is used: which looks at its counter are of the timed steps, and rates between them."""

from __future__ import annotations

import pytest

from bench.link_use import rates, training

# 1 MB a second from 3 s on to 10 s, after a broadcast in the first second; looks every 20 ms.
LOOKS = [(n / 50, int(1e6 * (min(n / 50, 1.0) + max(0.0, min(n / 50, 10.0) - 3)))) for n in range(600)]


def test_the_last_seconds_until_something_was_sent_are_of_training() -> None:
    found = training(LOOKS, 4.0, 20_000)
    assert found[-1][0] == pytest.approx(10.0, abs=0.15)
    assert found[-1][0] - found[0][0] == pytest.approx(4.0, abs=0.03)
    assert training([(0.0, 5), (0.02, 5)], 1.0, 100) == [(0.0, 5), (0.02, 5)]


def test_rates_are_of_windows_one_after_the_other() -> None:
    found = rates(training(LOOKS, 5.0, 20_000), 0.1)
    assert 40 <= len(found) <= 50
    assert found[:-1] == pytest.approx([1e6] * (len(found) - 1), rel=0.01)
    assert max(rates(LOOKS, 0.1)) == pytest.approx(1e6, rel=0.01)
    assert rates(LOOKS[:3], 0.1) == []
