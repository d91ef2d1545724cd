"""The result of an all-reduce benchmark: samples by size and contender, as a table and lines of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import geometric_mean, median

from bench.metrics import bus_bandwidth, format_size, format_time, relative_spread, table
from hvpipe.specs.tuning import fastest, setting

LARGE_BYTES = 1 << 20  # from this size on bandwidth counts, below it latency
LINK_LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Row:
    """One size: seconds of each sample by contender, and of a copy on all ranks at once.

    Contenders are "hvpipe", "mpi" (MPI_Allreduce as it is) and "mpi-best" (with `algorithm`, the fastest of
    Open MPI's for this size).
    """

    size_bytes: int
    samples_s: dict[str, list[float]]
    copy_samples_s: list[float]
    algorithm: str = ""

    def seconds(self, contender: str) -> float:
        """Return the median time of one operation."""
        return median(self.samples_s[contender])

    @property
    def speedups(self) -> dict[str, float]:
        """How many times faster hvpipe is than each other contender."""
        others = [who for who in self.samples_s if not who.startswith("hvpipe")]
        if "hvpipe" not in self.samples_s:
            return {}
        return {who: self.seconds(who) / self.seconds("hvpipe") for who in others}

    @property
    def over_fastest(self) -> float | None:
        """The time of hvpipe over that of its fastest algorithm; None if these were not measured."""
        each = self.each_algorithm.values()
        return self.seconds("hvpipe") / min(each) if each else None

    @property
    def each_algorithm(self) -> dict[str, float]:
        """The median times of hvpipe's algorithms, by name, as far as they were measured."""
        own = [who for who in self.samples_s if who.startswith("hvpipe-")]
        return {who.removeprefix("hvpipe-"): self.seconds(who) for who in own}


@dataclass(frozen=True)
class AllReduceReport:
    """Every size, and where it ran. link_bits_per_s is the measured two-way rate, None on one host.

    Bus bandwidth counts ranks, as in nccl-tests. A host's link carries what the ring of hosts needs, which is
    less if several ranks share a host.
    """

    ranks: int
    where: str
    hosts: int
    mpi: str
    rows: tuple[Row, ...]
    link_bits_per_s: float | None = None
    in_place: bool = True

    @property
    def contenders(self) -> list[str]:
        return list(self.rows[0].samples_s) if self.rows else []

    def bus(self, row: Row, contender: str) -> float:
        """Return the bus bandwidth in bytes per second."""
        return bus_bandwidth(row.size_bytes, row.seconds(contender), self.ranks)

    def fraction(self, row: Row, contender: str) -> float:
        """Return what the medium carries over what it can: the link's two-way rate, or one rank's copy on a
        host.
        """
        if self.link_bits_per_s is not None:
            carried = bus_bandwidth(row.size_bytes, row.seconds(contender), self.hosts)
            return carried * 8 / self.link_bits_per_s
        return self.bus(row, contender) / (row.size_bytes / median(row.copy_samples_s))

    def summary(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        large = [row for row in self.rows if row.size_bytes >= LARGE_BYTES]
        for who in self.rows[0].speedups if self.rows else ():
            figures[f"worst_speedup_over_{who}"] = min(row.speedups[who] for row in self.rows)
            if large:
                mean = geometric_mean([row.speedups[who] for row in large])
                figures[f"geometric_mean_speedup_over_{who}_from_1MB"] = mean
        if over := [row.over_fastest for row in self.rows if row.over_fastest is not None]:
            figures["worst_time_over_its_fastest_algorithm"] = max(over)
        if self.link_bits_per_s is not None:
            large = [row for row in self.rows if row.size_bytes >= LINK_LARGE_BYTES]
        medium = "copy" if self.link_bits_per_s is None else "link"
        for contender in self.contenders:
            fractions = [self.fraction(row, contender) for row in large]
            if fractions:
                figures[f"{contender}_least_fraction_of_{medium}"] = min(fractions)
                figures[f"{contender}_mean_fraction_of_{medium}"] = geometric_mean(fractions)
        return figures

    @property
    def fastest(self) -> str | None:
        """The fastest algorithm by size, for HVPIPE_ALL_REDUCE; None if they were not measured.

        Another one than at the size before must be 5 % faster.
        """
        each = {row.size_bytes: row.each_algorithm for row in self.rows}
        return setting(fastest(each)) if all(each.values()) else None

    def to_json(self) -> str:
        """Return a line with the summary, and one for each size with medians and spreads."""
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        lines = [{**head, "summary": self.summary(), "fastest": self.fastest}]
        for row in self.rows:
            every = {**row.samples_s, "copy": row.copy_samples_s}
            median_s = {who: median(samples) for who, samples in every.items()}
            spread = {who: relative_spread(samples) for who, samples in every.items()}
            figures = {"size_bytes": row.size_bytes, "median_s": median_s, "spread": spread}
            lines.append({**figures, "algorithm": row.algorithm})
        return "".join(json.dumps(line) + "\n" for line in lines)

    def to_text(self) -> str:
        medium = "copy" if self.link_bits_per_s is None else "link"
        header = ["size"]
        rates = len(self.contenders) <= 3  # more would not fit on a screen
        for who in self.contenders:
            header += [f"{who} time", "+-"]
            header += ["algbw GB/s", "busbw GB/s", f"of {medium}"] if rates else []
        header += [f"speedup over {who}" for who in (self.rows[0].speedups if self.rows else ())]
        header += ["best algorithm"] if "mpi-best" in self.contenders else []
        lines = []
        for row in self.rows:
            line = [format_size(row.size_bytes)]
            for who in self.contenders:
                seconds = row.seconds(who)
                line += [format_time(seconds), f"{relative_spread(row.samples_s[who]):.0%}"]
                line += [
                    f"{row.size_bytes / seconds / 1e9:.4g}",
                    f"{self.bus(row, who) / 1e9:.4g}",
                    f"{self.fraction(row, who):.1%}",
                ][: None if rates else 0]
            line += [f"{speedup:.2f}x" for speedup in row.speedups.values()]
            lines.append(line + ([row.algorithm] if "mpi-best" in self.contenders else []))
        to = "in place" if self.in_place else "into another buffer"
        head = f"{self.ranks} ranks, {self.where}, {self.mpi}; float32, sum, {to}, verified"
        if self.link_bits_per_s is not None:
            head += f"; link {self.link_bits_per_s / 1e6:.1f} Mb/s each way, both ways busy"
        figures = "\n".join(f"{name} = {value:.3f}" for name, value in self.summary().items())
        found = "" if self.fastest is None else f"\nfastest by size: HVPIPE_ALL_REDUCE={self.fastest}"
        return f"{head}\n{table(header, lines)}\n{figures}{found}"
