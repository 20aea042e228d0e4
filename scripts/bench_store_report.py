"""What the store benchmark found: from samples to rows, aims and a table. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench_store_rounds import Sample, Taken

MIB = 1 << 20
GIB = 1 << 30
CONTENDERS = ("checked", "bare", "client", "raw")


@dataclass(frozen=True, slots=True)
class Aim:
    """What a ratio of a row should be: at least `limit`, or with `at_most` at most that."""

    limit: float
    at_most: bool = False

    def verdict(self, value: float) -> str:
        """`ok`, or on which side it has failed."""
        if self.at_most:
            return "ok" if value <= self.limit else "OVER"
        return "ok" if value >= self.limit else "UNDER"


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one object size with so many in flight: batches of every contender, round by round."""

    store: str
    client: str | None
    operation: str
    object_bytes: int
    num_in_flight: int
    num_jobs: int
    taken: Taken = field(repr=False)

    @property
    def num_rounds(self) -> int:
        return len(self.taken["checked"])

    @property
    def num_bytes(self) -> int:
        """Bytes of a batch."""
        return self.num_jobs * self.object_bytes

    def mib_per_s(self, name: str) -> float:
        """Median over rounds."""
        return self.num_bytes / MIB / statistics.median(sample.wall_s for sample in self.taken[name])

    def cpu_s_per_gib(self, name: str) -> float:
        """CPU seconds of this process over all rounds, a GiB; the server's are not in it."""
        samples = self.taken[name]
        return sum(sample.cpu_s for sample in samples) / (len(samples) * self.num_bytes / GIB)

    def speed_ratio(self, name: str, other: str) -> float:
        """Median over rounds of how many times as fast `name` was as `other` in the same round."""
        return statistics.median(theirs.wall_s / mine.wall_s for mine, theirs in self._pairs(name, other))

    def ratios(self) -> dict[str, float]:
        """What aims are about; ratios to a contender that this row lacks are left out.

        `client` and `raw` are speeds with checks over theirs, `envelope` is the time that checks add to the bare
        store's, `client_cpu` is CPU with checks over the client's.
        """
        found = {"envelope": self.speed_ratio("bare", "checked") - 1}
        found |= {name: self.speed_ratio("checked", name) for name in ("client", "raw") if name in self.taken}
        if "client" in self.taken:
            found["client_cpu"] = self.cpu_s_per_gib("checked") / self.cpu_s_per_gib("client")
        return found

    def aims(self) -> dict[str, Aim]:
        """By the name of the ratio."""
        found = {"envelope": Aim(0.10, at_most=True)}
        if self.store.startswith("redis") and self.object_bytes >= MIB:
            found |= {"client": Aim(1.2), "raw": Aim(0.6)} if self.operation == "read" else {"client": Aim(1.4)}
        if self.store == "s3" and self.operation == "read":
            found |= self._s3_read_aims()
        return found

    def verdicts(self) -> dict[str, str]:
        """By the name of the ratio."""
        ratios = self.ratios()
        return {name: aim.verdict(ratios[name]) for name, aim in self.aims().items()}

    def to_json(self) -> dict[str, object]:
        """Everything, samples included."""
        names = [name for name in CONTENDERS if name in self.taken]
        return {
            "store": self.store,
            "client": self.client,
            "operation": self.operation,
            "object_bytes": self.object_bytes,
            "in_flight": self.num_in_flight,
            "jobs": self.num_jobs,
            "rounds": self.num_rounds,
            "mib_per_s": {name: self.mib_per_s(name) for name in names},
            "cpu_s_per_gib": {name: self.cpu_s_per_gib(name) for name in names},
            "ratios": self.ratios(),
            "bare_ratios": {name: self.speed_ratio("bare", name) for name in names if name in ("client", "raw")},
            "aims": {name: aim.limit for name, aim in self.aims().items()},
            "verdicts": self.verdicts(),
            "wall_s": {name: [sample.wall_s for sample in self.taken[name]] for name in names},
            "cpu_s": {name: [sample.cpu_s for sample in self.taken[name]] for name in names},
        }

    def _pairs(self, name: str, other: str) -> Sequence[tuple[Sample, Sample]]:
        return list(zip(self.taken[name], self.taken[other], strict=True))

    def _s3_read_aims(self) -> dict[str, Aim]:
        if self.object_bytes == 256 << 10:
            if self.num_in_flight == 1:
                return {"client": Aim(1.7)}
            return {"client": Aim(2.0), "client_cpu": Aim(0.4, at_most=True)}
        return {"client": Aim(1.2)} if self.object_bytes == 32 * MIB else {}


def table(rows: Sequence[Row]) -> str:
    """All rows with their aims."""
    head = (
        f"{'store':<11}{'way':<6}{'KiB':>7}{'fly':>4}{'rounds':>7}  "
        + "".join(f"{name:>9}" for name in CONTENDERS)
        + f"{'x client':>12}{'x raw':>12}{'envelope':>12}{'cpu x client':>14}{'CPU-s/GiB':>11}{'client':>8}"
    )
    lines = ["MiB/s, medians over rounds; ratios are medians of pairs from the same round", head]
    lines += [line(row) for row in rows]
    return "\n".join(lines)


def line(row: Row) -> str:
    """One row of the table; a dash where there is nothing to compare with."""
    speeds = (f"{row.mib_per_s(name):>9,.0f}" if name in row.taken else f"{'-':>9}" for name in CONTENDERS)
    client_cpu = f"{row.cpu_s_per_gib('client'):>8.2f}" if "client" in row.taken else f"{'-':>8}"
    return (
        f"{row.store:<11}{row.operation:<6}{row.object_bytes >> 10:>7,}{row.num_in_flight:>4}{row.num_rounds:>7}  "
        + "".join(speeds)
        + f"{judged(row, 'client'):>12}{judged(row, 'raw'):>12}{judged(row, 'envelope'):>12}"
        + f"{judged(row, 'client_cpu'):>14}{row.cpu_s_per_gib('checked'):>11.2f}{client_cpu}"
    )


def judged(row: Row, name: str) -> str:
    """A ratio and its verdict."""
    ratio = row.ratios().get(name)
    if ratio is None:
        return "-"
    number = f"{ratio:+.0%}" if name == "envelope" else f"{ratio:.2f}"
    return f"{number} {row.verdicts().get(name, ''):<5}"


def summary(rows: Sequence[Row]) -> str:
    """How many aims were met, and each that was not, in words."""
    verdicts = [(row, name, verdict) for row in rows for name, verdict in row.verdicts().items()]
    missed = [missed_line(row, name, verdict) for row, name, verdict in verdicts if verdict != "ok"]
    return "\n".join([f"{len(verdicts) - len(missed)} of {len(verdicts)} aims met", *missed])


def missed_line(row: Row, name: str, verdict: str) -> str:
    """One aim that was missed; beside a speed, what the store reaches without checks."""
    bare = f" ({row.speed_ratio('bare', name):.2f} without checks)" if name in row.taken else ""
    return (
        f"  {row.store} {row.operation}, {row.object_bytes >> 10:,} KiB, {row.num_in_flight} in flight: {name} "
        f"{row.ratios()[name]:.2f} is {verdict} its aim of {row.aims()[name].limit}{bare}"
    )
