"""What the engine notes for the trace has an end, and it is counted what comes after it."""

from __future__ import annotations

import subprocess

from native_build import build


def test_events_for_which_there_is_no_room_are_counted() -> None:
    driver = build("event_log_driver.cc")
    done = subprocess.run([str(driver)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["1 dropped, off: 0", "a", "b"]
