"""`python -m bench.all_reduce`."""

from __future__ import annotations

import sys

from bench.all_reduce.command import main

if __name__ == "__main__":
    sys.exit(main())
