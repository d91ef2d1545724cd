"""`python -m bench.planning`."""

from __future__ import annotations

import sys

from bench.planning.command import main

if __name__ == "__main__":
    sys.exit(main())
