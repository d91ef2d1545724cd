"""`python -m bench.step`."""

from __future__ import annotations

import sys

from bench.step.command import main

if __name__ == "__main__":
    sys.exit(main())
