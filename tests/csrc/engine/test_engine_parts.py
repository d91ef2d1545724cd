"""Engine parts that need neither MPI nor a GPU: posted messages, memory pool, send budget, segments."""

from __future__ import annotations

import subprocess

from native_build import build


def run(case: str) -> list[str]:
    """Run one case of the driver and return the lines that it prints."""
    driver = build("engine_parts_driver.cc")
    done = subprocess.run([str(driver), case], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_posted_message_is_taken_once_and_only_sends_end_with_an_error() -> None:
    assert run("posted") == [
        "first taken: 1, again: 0",
        "second ended: the end",
        "second taken: 0, receive taken: 1",
    ]


def test_the_memory_pool_reuses_memory_and_frees_it_when_the_device_is_full() -> None:
    # Sizes are rounded up to a quarter of a power of two: 1000 to 1024, 1900 to 2048.
    assert run("pool") == [
        "allocates 1024",
        "again: 1",
        "allocates 1024",
        "in use: 1",
        "allocates 2048",
        "error: full",
    ]


def test_returned_sends_are_available_from_the_next_pass_on() -> None:
    assert run("budget") == ["before the next pass: 1", "after it: 0"]


def test_arrays_are_split_into_pieces_that_differ_by_one_element() -> None:
    assert run("segments") == ["0+3", "3+3", "6+2", "1 1 2"]
