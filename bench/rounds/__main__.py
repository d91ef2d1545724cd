"""`python -m bench.rounds`."""

from __future__ import annotations

import sys

from bench.rounds.command import main

if __name__ == "__main__":
    sys.exit(main())
