"""`hvpipe plan` on malformed input: one line on stderr, an exit code, no traceback, soon."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from hvpipe import cli
from hvpipe.commands import plan_report, plan_request
from hvpipe.plan.pipelining import Pipelining
from hvpipe.specs.cluster import Link, equal_cluster
from hvpipe.trace.text_chart import draw
from model_graphs import chain

WRONG = st.one_of(
    st.sampled_from(
        ["", "\ud800", "a\nb", "\x1b[31m", "x" * 1000, 1e308, -1, 1e300, 10**400, float("nan"), None, [], {}]
    ),
    st.text(max_size=5),
    st.floats(),
    st.integers(),
)


def run(profile: str, cluster: str, *more: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(["plan", profile, "--cluster", cluster, "--no-baselines", *more])
        except SystemExit as left:
            code = int(left.code or 0)
    return code, out.getvalue(), err.getvalue()


def one_layer(**fields: Any) -> str:
    """Return a profile of one layer with these fields."""
    document = chain(1).to_json()
    document["layers"][0] |= fields
    return json.dumps(document)


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, str]:
    """A profile and a cluster in which one value, somewhere, is replaced, removed, or added."""
    profile: Any = chain(1, 2, 3, output_bytes=10, weight_bytes=10).to_json()
    cluster: Any = equal_cluster(2, Link(1e-3, 1e6), memory_bytes=1000).to_json()
    at: Any = draw(st.sampled_from([profile, cluster]))
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and draw(st.integers(0, 3)):
            at = at[key]
            continue
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "replace":
            at[key] = draw(WRONG)
        elif how == "remove":
            del at[key]
        elif isinstance(at, dict):
            at[draw(st.text(max_size=4))] = draw(WRONG)
        break
    return json.dumps(profile), json.dumps(cluster)


@examples(60)
@given(documents())
def test_a_malformed_file_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, given: tuple[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("malformed")
    for name, text in zip(("p.json", "c.json"), given, strict=True):
        (folder / name).write_text(text)
    start_s = time.process_time()
    code, out, err = run(str(folder / "p.json"), str(folder / "c.json"))
    assert time.process_time() - start_s < 5
    assert (code, bool(out)) in ((0, True), (1, False))
    assert len(err.splitlines()) == (code == 1)
    assert out.isascii() or "\x1b" not in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"format": "hvpipe-profile", "format": "x"}', "the key 'format' twice"),
        (json.dumps({**chain(1).to_json(), "edgess": []}), "Received: 'edgess'"),
        (json.dumps({**chain(1).to_json(), "x" * 10**5: 1}), "Received: 'xxx"),
        (json.dumps({**chain(1).to_json(), "model": "\x1b]0;x\x07"}), "model should be a printable text"),
        (json.dumps({**chain(1).to_json(), "layers": []}), "at least one layer. Received: layers=[]"),
        (
            json.dumps({**chain(1).to_json(), "edges": [{"from": "x" * 10**5, "to": "y"}]}),
            "Received: 'xxx",
        ),
        (one_layer(weights_of="x" * 10**5), "Received: weights_of='xxx"),
        (one_layer(time_s={"x" * 10**5: [1, 2, 3]}), "by type, which is a printable text"),
        (one_layer(tensors=[{"bytes": 1, "users": ["x" * 10**5]}]), "Received: 'xxx"),
        (one_layer(forward_s=5e-324), "should be 0, or a number between 1e-18 and 1e+18 in size"),
        (one_layer(time_s={"t": [1, 1e-19]}), "should be 0, or a number between 1e-18 and 1e+18 in size"),
    ],
)
def test_what_a_message_says(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    equal_cluster(2).write(tmp_path / "c.json")
    code, _, err = run(str(tmp_path / "p.json"), str(tmp_path / "c.json"))
    assert code == 1
    assert says in err
    assert len(err) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("option", ["-o", "--png"])
@pytest.mark.parametrize("path", ["/", "", ".", "a\0b", "x" * 300, "/dev/null/x", "/nonexistent/x"])
def test_an_output_that_cannot_be_written(option: str, path: str, tmp_path: Path) -> None:
    chain(1).write(tmp_path / "p.json")
    equal_cluster(1).write(tmp_path / "c.json")
    code, _, err = run(str(tmp_path / "p.json"), str(tmp_path / "c.json"), option, path)
    assert code == 1
    assert "can be written" in err


def test_the_shortest_times_are_drawn(tmp_path: Path) -> None:
    """Regression: columns per second were infinite, and a place in the picture NaN."""
    chain(4e-18, 4e-18).write(tmp_path / "p.json")
    equal_cluster(2).write(tmp_path / "c.json")
    code, out, _ = run(str(tmp_path / "p.json"), str(tmp_path / "c.json"))
    assert code == 0
    assert out


def test_figures_are_finite_if_times_are_too_short_to_divide_by() -> None:
    """Regression: text said "inf samples/s" and "infx", and --json printed Infinity."""
    shortest = plan_request.make_plan(
        plan_request.PlanRequest(chain(5e-324, 5e-324), equal_cluster(2, Link(1.0)), Pipelining())
    )
    text = plan_report.to_text(shortest, lambda one: draw(one.trace, 80))
    document = plan_report.to_json(shortest)
    assert "inf" not in text
    json.dumps(document, allow_nan=False)
    assert document["forecast"]["samples_per_s"] is None


@pytest.mark.parametrize("what", ["keys", "cycle"])
def test_a_large_malformed_profile_is_refused_soon(what: str, tmp_path: Path) -> None:
    """Regression: the time grew with the square of the keys of an object, or of the layers of a cycle."""
    count, layer = 40_000, chain(1).to_json()["layers"][0]
    if what == "keys":
        text = "{" + ", ".join(f'"k{i}": 1' for i in [*range(count), count - 1]) + "}"
    else:
        layers = [{**layer, "name": f"l{i}"} for i in range(count)]
        edges = [{"from": f"l{i}", "to": f"l{(i + 1) % count}"} for i in range(count)]
        text = json.dumps({**chain(1).to_json(), "layers": layers, "edges": edges})
    (tmp_path / "p.json").write_text(text)
    equal_cluster(2).write(tmp_path / "c.json")
    start_s = time.process_time()
    code, _, err = run(str(tmp_path / "p.json"), str(tmp_path / "c.json"))
    assert time.process_time() - start_s < 4
    assert code == 1
    assert "the key 'k39999' twice" in err or "39996 more -> l0" in err


def test_a_long_cycle_is_named_in_a_short_line(tmp_path: Path) -> None:
    document = chain(1).to_json()
    layer = document["layers"][0]
    document["layers"] = [{**layer, "name": f"l{i}"} for i in range(2000)]
    document["edges"] = [{"from": f"l{i}", "to": f"l{(i + 1) % 2000}"} for i in range(2000)]
    (tmp_path / "p.json").write_text(json.dumps(document))
    equal_cluster(2).write(tmp_path / "c.json")
    code, _, err = run(str(tmp_path / "p.json"), str(tmp_path / "c.json"))
    assert code == 1
    assert "l0 -> l1 -> l2 -> l3 -> 1996 more -> l0" in err
    assert len(err) < 200 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("more", "options", "says"),
    [
        ('[[link]]\nbetween = ["a-0", "x"]\n', (), "(a-0, a-1, a-2, a-3, a-4, a-5, a-6, a-7, 292 more)"),
        ('[[host]]\nname = "b"\nrack = "x"\n[[rack]]\nname = "r"\ncount = 300\n', (), "r-7, 292 more."),
        ("", ("--mode", "pipeline", "--microbatches", "300"), "; 4 more."),
        (
            '[[host]]\nname = "b"\ncount = 100\n[[host.device]]\nname = "x"\nspeed = 0.5\n',
            ("--mode", "data", "--batch-size", "4000000", "--microbatches", "1"),
            "batches of 11429 (ranks 0 to 199), 11428 (ranks 200 to 299), 5714 (ranks 300 to 399) samples.",
        ),
    ],
)
def test_lines_of_many_devices_are_short(
    more: str, options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """Regression: messages and advice listed hundreds of devices, racks or batches."""
    chain(*[1] * 12, weight_bytes=10**9).write(tmp_path / "p.json")
    room = "" if "data" in options else "memory_bytes = 1e9\n"
    text = f'[[host]]\nname = "a"\ncount = 300\n[[host.device]]\nname = "a"\n{room}{more}'
    (tmp_path / "c.toml").write_text(text)
    _, out, err = run(str(tmp_path / "p.json"), str(tmp_path / "c.toml"), *options)
    assert says in out + err
    assert max(map(len, (out + err).splitlines())) < 900 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--microbatches", "x"), "should have whole numbers. Received: 'x'"),
        (("--recompute-stages", "a,b"), "should have whole numbers. Received: 'a'"),
        (("--batch-size", "1000000000000"), "at most 1,000,000,000 samples"),
        (("--batch-size", "1e12"), "at most 1,000,000,000 samples. Received: 1000000000000"),
        (("--batch-size", "1.5"), "should have whole numbers. Received: '1.5'"),
        (("--stages", "9" * 5000), "should be at most 1e+18 in size. Received: '999"),
    ],
)
def test_options_out_of_range(option: tuple[str, ...], says: str, tmp_path: Path) -> None:
    chain(1, 2).write(tmp_path / "p.json")
    equal_cluster(2).write(tmp_path / "c.json")
    code, out, err = run(str(tmp_path / "p.json"), str(tmp_path / "c.json"), *option)
    assert (code in (1, 2), out) == (True, "")
    assert says in err
    assert len(err.splitlines()[-1]) < 300
    assert "_" not in err.splitlines()[-1].split("should")[0].replace("hvpipe plan", "")
