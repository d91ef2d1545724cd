"""`python -m bench.pipelines`: pipelines of several models on several clusters (bench/pipeline/sweep.py)."""

from __future__ import annotations

import sys

from bench.pipeline.sweep import main

if __name__ == "__main__":
    sys.exit(main())
