"""`python -m bench.pipeline`."""

from __future__ import annotations

import sys

from bench.pipeline.command import main

if __name__ == "__main__":
    sys.exit(main())
