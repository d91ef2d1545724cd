"""The engine's event log has a fixed capacity and counts the events that it drops."""

from __future__ import annotations

import subprocess

from native_build import build


def test_events_beyond_the_capacity_are_counted() -> None:
    driver = build("event_log_driver.cc")
    done = subprocess.run([str(driver)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["1 dropped, off: 0", "a", "b"]
