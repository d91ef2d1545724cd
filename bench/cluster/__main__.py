"""`python -m bench.cluster`."""

from __future__ import annotations

import sys

from bench.cluster.command import main

if __name__ == "__main__":
    sys.exit(main())
