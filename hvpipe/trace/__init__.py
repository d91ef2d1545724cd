"""Timelines: what every rank did when, as files, figures and pictures."""

from hvpipe.trace.events import CATEGORIES, Clock, Event, Trace

__all__ = ["CATEGORIES", "Clock", "Event", "Trace"]
