"""Whatever a file holds, its reader returns an object or raises an HvpipeError.

`pytest --hypothesis-profile=fuzz FILES` tries more; FUZZ_EXAMPLES says how many.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from hvpipe.errors import HvpipeError
from hvpipe.plan.greedy import partition
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.schedule import Schedule, make_schedule
from hvpipe.specs.cluster import Cluster, Link, equal_cluster
from hvpipe.specs.profile import Profile
from hvpipe.trace.events import Event, Trace
from model_graphs import chain

WRONG = st.one_of(
    st.sampled_from(["", "\ud800", "a\nb", 1e308, -1, 10**400, float("nan"), None, True, [], {}, [[1]]]),
    st.text(max_size=4),
    st.floats(),
    st.integers(),
)
PROFILE = chain(1, 2, 3, output_bytes=10, weight_bytes=10)
CLUSTER = equal_cluster(2, Link(1e-3, 1e6), memory_bytes=1000)
EVENTS = (
    Event("bucket 3", "reduce", 1, "engine", 10.25, 10.5, {"bytes": 4096}),
    Event("host busy", "utilization", 1, "utilization", 10.3, 10.3, {"share": 0.75}),
)
TRACE = Trace(EVENTS, {"images": 64, "counters": [{"bytes_sent": 4096}]})
READERS: Mapping[str, tuple[Any, Callable[[Path], object]]] = {
    "profile": (PROFILE.to_json(), Profile.read),
    "cluster": (CLUSTER.to_json(), Cluster.read),
    "plan": (partition(PROFILE, CLUSTER, 2).to_json(), Plan.read),
    "schedule": (make_schedule("1f1b", 2, 3).to_json(), Schedule.read),
    "trace": (TRACE.to_chrome_json(), Trace.read),
}
PIPEDREAM = (Path(__file__).parent / "data" / "profiles" / "alexnet.txt").read_text()[:2000]


def _read(reader: Callable[[Path], object], path: Path, text: str) -> None:
    path.write_text(text, errors="surrogatepass")
    with contextlib.suppress(HvpipeError):
        reader(path)


@pytest.mark.parametrize("name", READERS)
@examples(30)
@given(data=st.data())
def test_one_wrong_value(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    document = json.loads(json.dumps(READERS[name][0]))
    at: Any = document
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    if data.draw(st.integers(0, 4)):
        at[key] = data.draw(WRONG)
    else:
        del at[key]
    _read(READERS[name][1], tmp_path_factory.mktemp(name) / "a.json", json.dumps(document))


@pytest.mark.parametrize("name", [*READERS, "pipedream"])
@examples(30)
@given(data=st.data())
def test_wrong_bytes(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    text, reader = (PIPEDREAM, Profile.read) if name == "pipedream" else READERS[name]
    text = text if isinstance(text, str) else json.dumps(text)
    for _ in range(data.draw(st.integers(1, 3))):
        place, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 30))
        text = text[:place] + data.draw(st.text(max_size=3)) + text[place + length :]
    path = tmp_path_factory.mktemp(name) / ("a.txt" if name == "pipedream" else "a.json")
    _read(reader, path, text)
