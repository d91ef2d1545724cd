"""A rank's program whose output also goes to files: pipes, folders, signals; with mpirun in test_run.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distributed import Run, environment, run
from hvpipe.commands.rank_output import appending, copy, rank_folder

RANK = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "12"}


def recording(logs: Path, program: str) -> list[str]:
    return [
        *(sys.executable, "-m", "hvpipe.commands.rank_output", str(logs)),
        *(sys.executable, "-u", "-c", f"import os, signal, sys, time; {program}"),
    ]


def record(logs: Path, program: str) -> Run:
    return run(recording(logs, program), limit_s=30.0, env=RANK)


@pytest.mark.parametrize(
    ("rank", "size", "name"),
    [(0, 1, "rank.0"), (1, 2, "rank.1"), (9, 10, "rank.9"), (7, 11, "rank.07"), (7, 101, "rank.007")],
)
def test_folders_sort_by_rank(rank: int, size: int, name: str) -> None:
    assert rank_folder(Path("logs"), rank, size) == Path("logs") / name


def test_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    record(tmp_path, "print('a long line')")
    result = record(tmp_path, "print('short'); print('bad', file=sys.stderr); sys.exit(3)")
    assert result.returncode == 3
    assert sorted(result.output.splitlines()) == ["bad", "short"]
    assert (tmp_path / "rank.07" / "stdout").read_text() == "short\n"
    assert (tmp_path / "rank.07" / "stderr").read_text() == "bad\n"


def test_a_later_start_of_a_job_goes_on_in_its_files(tmp_path: Path) -> None:
    record(tmp_path, "print('why it failed')")
    command = appending(recording(tmp_path, "print('again')"))
    assert appending(command) == command
    assert run(list(command), limit_s=30.0, env=RANK).returncode == 0
    assert (tmp_path / "rank.07" / "stdout").read_text() == "why it failed\nagain\n"


def test_the_program_has_no_child_that_it_did_not_start(tmp_path: Path) -> None:
    result = record(tmp_path, "os.wait()")
    assert "ChildProcessError" in result.output, result.describe()


def test_last_words_after_a_signal_to_the_group_are_kept(tmp_path: Path) -> None:
    program = (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('last words'), sys.exit(4)));"
        "print('ready'); time.sleep(30)"
    )
    command = recording(tmp_path, program)
    process = subprocess.Popen(
        command, env=environment(RANK), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert (process.wait(30), process.stdout.read()) == (4, "last words\n")
    assert (tmp_path / "rank.07" / "stdout").read_text() == "ready\nlast words\n"
    process.stdout.close()


def test_a_folder_that_cannot_be_written_to_ends_the_rank(tmp_path: Path) -> None:
    (tmp_path / "rank.07").touch()
    result = record(tmp_path, "print('started')")
    assert result.returncode == 2
    assert "hvpipe run: --output-filename: " in result.output
    assert "started" not in result.output


def test_a_full_disk_loses_the_file_but_not_the_console(capfd: pytest.CaptureFixture[str]) -> None:
    (source, into), (read, console) = os.pipe(), os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    copier = threading.Thread(target=copy, args=({source: (console, full)},))
    copier.start()
    os.write(into, b"first")
    assert os.read(read, 100) == b"first"
    os.write(into, b"second")
    os.close(into)
    copier.join(10)
    assert os.read(read, 100) == b"second"
    assert capfd.readouterr().err == "hvpipe run: output of this rank is lost: No space left on device\n"
    for descriptor in (source, console, read, full):
        os.close(descriptor)


def test_a_console_that_nobody_reads_does_not_end_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    (source, into), (unread, console), (read, file) = os.pipe(), os.pipe(), os.pipe()
    os.close(unread)
    os.write(into, b"text")
    os.close(into)
    copy({source: (console, file)})
    assert os.read(read, 100) == b"text"
    assert "lost: Broken pipe" in capfd.readouterr().err
    for descriptor in (source, console, read, file):
        os.close(descriptor)


def test_a_console_that_does_not_block_gets_everything() -> None:
    (source, into), (reading, console) = os.pipe(), os.pipe()
    os.set_blocking(console, False)
    text = b"x" * 200_000  # more than a pipe holds
    program = [sys.executable, "-c", f"import os; os.write({into}, b'x' * {len(text)})"]
    with subprocess.Popen(program, pass_fds=[into]), os.fdopen(reading, "rb") as reader:
        os.close(into)
        copier = threading.Thread(target=copy, args=({source: (console,)},))
        copier.start()
        time.sleep(0.2)  # the pipe is full now
        assert reader.read(len(text)) == text
        copier.join(30)
    os.close(console)
    os.close(source)
