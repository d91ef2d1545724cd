"""Pipeline schedules as data: actions, the algorithms that order them, sends and receives, verification."""

from hvpipe.schedule.action import Action
from hvpipe.schedule.schedule import NAMES, Schedule, deal, make_schedule

make = make_schedule  # its name when hvpipe.schedule was one module

__all__ = ["NAMES", "Action", "Schedule", "deal", "make", "make_schedule"]
