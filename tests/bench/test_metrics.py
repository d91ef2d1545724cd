"""Formulas and reports of the benchmarks, on figures worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from bench import metrics
from bench.all_reduce import __main__ as all_reduce
from bench.all_reduce.report import AllReduceReport, Row
from bench.errors import BenchError

MB = 1 << 20


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0.0), (2, 1.0), (3, 4 / 3), (4, 1.5), (8, 1.75)])
def test_ring_factor(ranks: int, factor: float) -> None:
    assert metrics.ring_factor(ranks) == pytest.approx(factor)


def test_bandwidths_as_nccl_tests_define_them() -> None:
    # 4,000,000 bytes in 2 ms are 2 GB/s. On 4 ranks each link carries 1.5 times the buffer.
    assert metrics.bus_bandwidth(4_000_000, 0.002, 4) == pytest.approx(3e9)


def test_communication_bound() -> None:
    # 95.2 MB on 2 ranks cross each link once: 761.6 Mb at 300 Mb/s.
    assert metrics.communication_bound_s(95_200_000, 2, 300e6) == pytest.approx(2.5387, abs=1e-4)
    assert metrics.communication_bound_s(95_200_000, 4, 300e6) == pytest.approx(3.808)
    assert metrics.communication_bound_s(95_200_000, 1, 300e6) == 0.0
    assert metrics.communication_bound_s(95_200_000, 2, None) == 0.0


def test_means() -> None:
    # The quartiles of 8 9 10 11 12 are 9 and 11: half their distance is 1, a tenth of the median.
    assert metrics.relative_spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.1)
    assert metrics.relative_spread([8.0]) == 0.0


def test_sizes_of_a_sweep() -> None:
    assert metrics.sizes(4096, 256 * MB) == [4096 * 4**i for i in range(9)]
    assert metrics.sizes(4, 100) == [4, 16, 64, 100]
    assert metrics.sizes(64, 64) == [64]
    with pytest.raises(BenchError, match="Received: smallest=64, largest=4"):
        metrics.sizes(64, 4)


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("4K", 4096), ("256MB", 256 * MB), ("1GiB", 1 << 30)]
)
def test_size_is_read(text: str, size: int) -> None:
    assert metrics.parse_size(text) == size


def test_bad_size_is_named() -> None:
    with pytest.raises(BenchError, match="Received: size='big'"):
        metrics.parse_size("big")


def test_figures_are_written_short() -> None:
    assert [metrics.format_size(size) for size in (4096, 256 * MB, 1000)] == ["4 KB", "256 MB", "1000 B"]
    assert [metrics.format_time(s) for s in (2.54, 0.0123, 4.2e-5, 5e-7)] == [
        "2.54 s",
        "12.3 ms",
        "42 us",
        "0.5 us",
    ]


def test_a_time_that_rounds_up_to_the_next_unit_uses_that_unit() -> None:
    assert [metrics.format_time(s) for s in (0.9996, 0.9994, 0.9996e-3)] == ["1 s", "999 ms", "1 ms"]


def test_repetitions_fill_a_sample() -> None:
    assert metrics.repetitions(0.02, 0.001) == 20
    assert metrics.repetitions(0.02, 1.0) == 1
    assert metrics.repetitions(0.02, 0.0) == 1000


def test_table_is_aligned() -> None:
    assert metrics.table(["a", "bcd"], [["10", "2"], ["3", "4"]]) == " a  bcd\n10    2\n 3    4"


def one_host_report() -> AllReduceReport:
    """Make a report of 2 ranks.

    4 KB: MPI 4 us, hvpipe 2 us. 1 MiB: 4x. 4 MiB: 9x, at half the bandwidth of a copy.
    """
    return AllReduceReport(
        2,
        "one host",
        1,
        "Open MPI",
        (
            Row(4096, {"mpi": [4e-6, 3e-6, 5e-6], "hvpipe": [2e-6]}, [1e-6]),
            Row(MB, {"mpi": [4e-4], "hvpipe": [1e-4]}, [1e-4]),
            Row(4 * MB, {"mpi": [9e-4], "hvpipe": [1e-4]}, [5e-5]),
        ),
    )


def test_all_reduce_summary_on_one_host() -> None:
    summary = one_host_report().summary()
    assert summary["worst_speedup_over_mpi"] == pytest.approx(2.0)
    assert summary["geometric_mean_speedup_over_mpi_from_1MB"] == pytest.approx(6.0)
    assert summary["hvpipe_least_fraction_of_copy"] == pytest.approx(0.5)
    assert summary["hvpipe_mean_fraction_of_copy"] == pytest.approx(math.sqrt(0.5))


def test_all_reduce_summary_on_links_counts_from_4_mb() -> None:
    # 4 ranks: 12.5 MB in 1.6 s are 93.75 Mb/s of bus bandwidth, on links of 100 Mb/s.
    rows = (Row(MB, {"hvpipe": [1e3]}, [1.0]), Row(12_500_000, {"hvpipe": [1.6]}, [1.0]))
    summary = AllReduceReport(4, "4 hosts", 4, "Open MPI", rows, 100e6).summary()
    assert summary == {
        "hvpipe_least_fraction_of_link": pytest.approx(0.9375),
        "hvpipe_mean_fraction_of_link": pytest.approx(0.9375),
    }


def test_ranks_of_a_host_share_its_link() -> None:
    # 2 hosts with 2 ranks each: the link carries the buffer once (2 (2 - 1) / 2), not 1.5 times.
    rows = (Row(12_500_000, {"hvpipe": [1.0]}, [1.0]),)
    report = AllReduceReport(4, "2 hosts", 2, "Open MPI", rows, 200e6)
    assert report.bus(rows[0], "hvpipe") == pytest.approx(18.75e6)
    assert report.fraction(rows[0], "hvpipe") == pytest.approx(0.5)


def test_the_fastest_algorithm_by_size() -> None:
    times = {4096: (1, 2), 8192: (2.08, 2), MB: (3, 2), 4 * MB: (5, 4.9)}
    rows = [
        Row(size, {"hvpipe": [2], "hvpipe-doubling": [doubling], "hvpipe-ring": [ring]}, [1])
        for size, (doubling, ring) in times.items()
    ]
    report = AllReduceReport(4, "4 hosts", 4, "Open MPI", tuple(rows))
    assert report.fastest == "doubling:8192,ring"
    assert report.summary()["worst_time_over_its_fastest_algorithm"] == 2
    assert "HVPIPE_ALL_REDUCE=doubling:8192,ring" in report.to_text()
    assert one_host_report().fastest is None


def test_all_reduce_report_as_json_and_text() -> None:
    report = one_host_report()
    head, *rows = map(json.loads, report.to_json().splitlines())
    assert head["summary"] == report.summary()
    assert rows[0]["median_s"] == {"mpi": 4e-6, "hvpipe": 2e-6, "copy": 1e-6}
    assert rows[0]["spread"]["mpi"] == pytest.approx(0.125)
    text = report.to_text()
    assert all(part in text for part in ("4 KB", "9.00x", "of copy"))
    # 4 MiB in 100 us on 2 ranks.
    assert "41.94" in text


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--min", "1M", "--max", "4K"], "Received: smallest=1048576"),
        (["--cluster", "2xfast"], "Received: rate='fast'"),
        (["--cluster", "none.toml"], "none.toml"),
        (["--cluster", "2x1gbit", "--hosts", "a"], "Give --hosts or --cluster"),
    ],
)
def test_all_reduce_refuses_bad_options(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all_reduce.main(words) == 1
    assert match in capsys.readouterr().err
