"""Pipeline schedules as data: actions, the algorithms that order them, sends and receives, verification."""
