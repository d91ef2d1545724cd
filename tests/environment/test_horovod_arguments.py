"""Arguments of Horovod's functions: ignored where they change nothing, refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from hvpipe.environment.horovod_arguments import check_other_arguments
from hvpipe.errors import HvpipeError


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"name": "loss", "device_dense": "", "sparse_as_dense": True},
        {"average": True},
        {"prescale_factor": 1.0, "process_set": None, "op": "average"},
    ],
)
def test_arguments_that_change_nothing(given: dict[str, Any]) -> None:
    check_other_arguments("allreduce", given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"average": False},
            "allreduce does not take .* average.*op='sum' instead of average=False. Received: average=False",
        ),
        ({"name": "loss", "prescale_factor": 0.5}, "a factor of the argument. Received: prescale_factor=0.5"),
        ({"groups": 4}, "Instead: bucket_bytes=. Received: groups=4"),
    ],
)
def test_arguments_that_would_change_something(given: dict[str, Any], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        check_other_arguments("allreduce", given)


def test_an_unknown_argument() -> None:
    with pytest.raises(TypeError, match=r"allreduce\(\) got an unexpected keyword argument 'opp'"):
        check_other_arguments("allreduce", {"opp": "sum"})
