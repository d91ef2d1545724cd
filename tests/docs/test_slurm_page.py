"""docs/slurm.md shows the scripts that `make slurm-test` runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["slurm.sh", "slurm-run.sh"])
def test_the_script_is_that_of_examples(name: str) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    shown = re.search(rf"^### {re.escape(name)}:.*?^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "examples" / name).read_text()
