"""The kinds of error that hvpipe raises; every message says what is wanted, then what was received."""

from __future__ import annotations


class HvpipeError(RuntimeError):
    """A wrong argument, setting or file; the base of every error below."""


class InitError(HvpipeError):
    """The ranks cannot be joined: no MPI, an unsuitable MPI, or an unsuitable launcher."""


class BuildMismatchError(InitError):
    """hvpipe was built against another TensorFlow or MPI than the one that runs."""


class MismatchError(HvpipeError):
    """The ranks disagree about what should be the same on all of them: shapes, dtypes, models, order."""


class DeadlineError(HvpipeError):
    """A wait took longer than allowed; the message names what was waited for."""


class PeerError(HvpipeError):
    """Another rank failed or left while this one depended on it."""


class PlanError(HvpipeError):
    """No plan does what was asked for (memory, stages), or a plan belongs to another model or cluster."""


class LaunchError(HvpipeError):
    """`hvpipe run` cannot start what was asked for: no mpirun, too few slots, contradicting options."""
