"""Starts a job again from its last checkpoint after a rank died, as long as it makes progress."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvpipe.blackbox import story
from hvpipe.checkpoints.folder import complete
from hvpipe.commands import join, lost_hosts, rank_output, slurm, stop
from hvpipe.commands.supervise import CHECKPOINT_GRACE_S, Grace, Outcome, supervise_job
from hvpipe.commands.told_errors import print_told
from hvpipe.environment.job_folder import (
    STOPPED,
    TOO_FEW,
    Loss,
    any_joined,
    exits_by_rank,
    last_checkpoint,
    new_job_folder,
    print_tracebacks,
    read_end,
    read_loss,
    told_by_rank,
)
from hvpipe.errors import HvpipeError, LaunchError, name_lost

_OPEN_MPIS_EXIT = re.compile(r"Process name: \[\S+,(\d+)\]\s+Exit code: +(\d+)")
# Open MPI 5 ends with 0 if it loses its daemon on a host, and kills the ranks on all others. It may do so
# while ranks leave with a code of hvpipe's.
_NO_END = (
    "hvpipe run: the launcher ended with exit code 0, but no rank here ended properly: a host was lost, or "
    "all ranks of this one, or a batch system ended them."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe run` for jobs that are interrupted."""
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="after a failure start again, up to K times, while hk.Checkpoint makes progress (default: 0)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=CHECKPOINT_GRACE_S,
        metavar="S",
        help=f"after SIGTERM, seconds for a last checkpoint (default: {CHECKPOINT_GRACE_S:g})",
    )


class Restarting:
    """Runs a job, and runs it again.

    Args:
        options: The options that `add_options` added.
        places: The ranks and hosts that the job starts with.
        launcher: What the launcher belongs to. Only Open MPI's tells an exit code from a signal.
    """

    def __init__(self, options: argparse.Namespace, places: join.Places, launcher: str = "Open MPI") -> None:
        self.places = places
        self._knows_codes = launcher == "Open MPI"
        self.joined = False
        """Whether the job goes on with other `places`: `hvpipe join` asked, or a pipeline lost ranks."""
        if options.restarts < 0:
            raise LaunchError(f"--restarts should be at least 0. Received: {options.restarts}")
        if not (math.isfinite(options.grace) and options.grace >= 0):
            raise LaunchError(f"--grace should be a number of seconds. Received: {options.grace}")
        self.allocation: Mapping[str, str] = {}
        """Variables that describe what is left of Slurm's allocation, if it has lost hosts."""
        self._before_join: join.Places | None = None
        """The places that the job goes back to if it cannot start with those of `hvpipe join`."""
        self._restarts = options.restarts
        self._flight_folder = getattr(options, "flight_recorder", None)
        self._grace = Grace(checkpoint_s=options.grace)
        self._elastic = getattr(options, "elastic", False)
        self._least = getattr(options, "min_np", None) or 1
        self._agent = getattr(options, "rsh_agent", None)
        self._verbose = getattr(options, "verbose", False)
        self._writes_files = getattr(options, "output_filename", None) is not None

    def __call__(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the command until it succeeds, is asked to stop, or fails too often; return its exit code."""
        failed_before = self.joined = False
        for left in range(self._restarts, -1, -1):
            with new_job_folder() as folder:
                most = sum(slurm.slots(environ)) or None
                join.register(folder, self.places, self._agent, self._least, most)
                earlier = self._records()
                if not (self._verbose or self._writes_files):  # files should have the tracebacks, too
                    print_tracebacks(folder)
                outcome = self._supervise(command, environ, folder)
                ended = read_end(folder)
                if ended and (outcome.code == 0 or (outcome.asked and ended == STOPPED)):
                    outcome = replace(outcome, code=ended)
                elif outcome.code == 0 and ended is None and self._lacks_an_end(folder):
                    outcome = replace(outcome, code=1)
                    print(_NO_END, file=sys.stderr, flush=True)
                verdict = ""
                if outcome.code not in (0, STOPPED) and not outcome.asked:
                    verdict = self._what_happened(folder, earlier, outcome.code) or who_exited(
                        folder, outcome
                    )
                told = not (self._verbose or self._writes_files) and print_told(folder, verdict)
                print(verdict if verdict or told else outcome.kept, end="", file=sys.stderr, flush=True)
                why_not = self._why_not_again(outcome, folder, failed_before, left)
                checkpoint = last_checkpoint(folder)
                wanted = join.wanted(folder)
                loss = read_loss(folder)
                started = any_joined(folder)
            before, self._before_join = self._before_join, None
            if outcome.code not in (0, STOPPED) and not (outcome.asked or started or before is None):
                print(
                    f"hvpipe run: the job could not start with {self.places}. It goes back to {before}.",
                    file=sys.stderr,
                    flush=True,
                )
                self.places, self.joined = before, True
                return outcome.code
            if outcome.code == STOPPED and not outcome.asked and (wanted or loss):
                if loss is None:
                    self._before_join = self.places
                else:
                    wanted = wanted or self.places.without(loss.ranks)
                    _tell_loss(loss, checkpoint)
                assert wanted is not None
                self.places, self.joined = wanted, True
            if outcome.code not in (0, STOPPED, TOO_FEW) and not outcome.asked and self._loses_hosts(environ):
                return outcome.code if self.joined else TOO_FEW
            if why_not is not None:
                if why_not and self._restarts:
                    print(f"hvpipe run: not started again: {why_not}", file=sys.stderr)
                return outcome.code
            failed_before, command = True, rank_output.appending(command)
            print(
                f"hvpipe run: the job failed with exit code {outcome.code}. Starting it again from "
                f"{checkpoint or 'the checkpoint that it finds'}; restarts left: {left - 1}.",
                file=sys.stderr,
                flush=True,
            )
        raise AssertionError

    def _supervise(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Outcome:
        elsewhere = stop.of_hosts(self.places.hosts, self._agent, folder, environ)
        quiet = not self._verbose
        return supervise_job(command, environ, folder, self._grace, quiet=quiet, ask_elsewhere=elsewhere)

    def _lacks_an_end(self, folder: Path) -> bool:
        """Tell whether a job has failed whose launcher ended with 0, and whose ranks reported no end.

        Open MPI ends with 0 if it loses a host.
        """
        # If no rank is here, only the hosts can tell.
        return any_joined(folder) or bool(lost_hosts.unreachable(self.places.hosts, self._agent))

    def _loses_hosts(self, environ: Mapping[str, str]) -> bool:
        """Tell whether the job fails because hosts are lost; go on without them if enough ranks are left."""
        if not self._elastic:
            return False
        gone = lost_hosts.unreachable(self.places.hosts, self._agent)
        left = self.places.without_hosts(gone)
        if not self.places.hosts and (allocation := slurm.smaller(environ)):
            gone = list(allocation.lost)
            left = join.Places(min(self.places.ranks, allocation.slots))
            self.allocation = allocation.environ
        if not gone:
            return False
        self.joined = left.ranks >= self._least
        print(
            f"hvpipe run: {', '.join(gone)} cannot be reached. "
            + (
                "The job starts again without these hosts, from its newest checkpoint."
                if self.joined
                else f"{left.ranks} ranks are left, and --min-np asks for {self._least}."
            ),
            file=sys.stderr,
            flush=True,
        )
        self.places = left if self.joined else self.places
        return True

    def _why_not_again(self, outcome: Outcome, folder: Path, failed_before: bool, left: int) -> str | None:
        """Return why a job that has ended is not started again, "" if that is plain; None if it is."""
        if outcome.code in (0, STOPPED) or outcome.asked:
            return ""
        if left == 0:
            return f"it has failed {self._restarts + 1} times"
        if last_checkpoint(folder) is None:
            if own := script_errors(folder):
                return f"the script failed before it made a new checkpoint: {own[0]}"
            if failed_before:
                return "no new checkpoint was made between two failures"
        return None

    def _records(self) -> set[Path]:
        """Return the folders of the starts in the folder of --flight-recorder."""
        return set(Path(self._flight_folder).glob("*")) if self._flight_folder else set()

    def _what_happened(self, folder: Path, earlier: set[Path], code: int) -> str:
        """Return what the recorders of this host's ranks say, in a line; "" if none of them ended badly."""
        kept = self._flight_folder
        new = self._records() - earlier if kept else set(folder.glob("flight*"))
        try:
            # Ranks that go on after a loss record in another folder.
            newest = next(iter(story.newest_first(new)), None)
            flights = story.read_records(newest).flights if newest else ()
        except (HvpipeError, OSError):
            return ""
        if not flights:
            return ""
        more = f" More: hvpipe blackbox {kept}" if kept else ""
        verdict = story.verdict(flights, code if self._knows_codes else None)
        return f"hvpipe run: {verdict}{more}\n"


def _tell_loss(loss: Loss, checkpoint: str | None) -> None:
    """Say what a pipeline has lost. The name of a checkpoint begins with its step."""
    again = "the steps since then"
    if checkpoint and (newest := complete(Path(checkpoint).parent)):  # ranks of another host may have made it
        checkpoint = str(newest[0])
    if checkpoint:
        repeated = loss.step - 1 - int(Path(checkpoint).name.partition("-")[0])
        again = (
            f"{repeated} finished step{'s' if repeated > 1 else ''}" if repeated > 0 else "no finished step"
        )
    print(
        f"hvpipe run: {name_lost(loss.ranks)} in step {loss.step}. The pipeline "
        f"starts again from {checkpoint or 'the checkpoint that it finds'}, and repeats {again}.",
        file=sys.stderr,
        flush=True,
    )


def who_exited(folder: Path, outcome: Outcome) -> str:
    """Return which rank gave the job its exit code, in a line; "" if it is unknown, or ranks told errors.

    It is for ranks that have left together, of whose ends no recorder tells.
    """
    exits = exits_by_rank(folder)
    if told_by_rank(folder):
        return ""
    if exits:
        rank = next((rank for rank, (code, _) in exits.items() if code == outcome.code), min(exits))
        code, call = exits[rank]
        return f"hvpipe run: Rank {rank} ended with exit code {code}: {call}.\n"
    if found := _OPEN_MPIS_EXIT.search(outcome.kept):
        return (
            f"hvpipe run: Rank {found[1]} ended with exit code {found[2]}: see what it printed last, or "
            "where it raises SystemExit or calls os._exit.\n"
        )
    return ""


def script_errors(folder: Path) -> list[str]:
    """Return the errors that ranks ended with, without those that followed from the loss of another rank."""
    told = told_by_rank(folder).values()
    return [line for line, _ in told if line.partition(" ")[0] not in story.LOST_A_PEER]
