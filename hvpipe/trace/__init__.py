"""Timelines of all ranks, as files, figures and pictures."""

from hvpipe.trace.events import CATEGORIES, Clock, Event, Trace

__all__ = ["CATEGORIES", "Clock", "Event", "Trace"]
