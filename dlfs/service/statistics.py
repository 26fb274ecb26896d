"""Computes rates, latencies and shares of time from two snapshots of readers' counters.

A snapshot is a plain dict as ``Dataset.stats`` and ``Dataset.member_stats`` return, from this
process or from a service. ``dlfs stall`` and ``dlfs top`` print the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = {
    "device_ns": "device",
    "verify_ns": "checking",
    "plan_ns": "planning",
    "rest_ns": "rest",
}
"""Phases of the reading threads' time: name for users by name of the counter. A thread is at rest
while it waits for the consumer."""

IDLE_SHARE = 0.5
"""Share of the reading threads' time. If they rest longer, the consumer is the bottleneck."""
HIT_SHARE = 0.95
"""Share of samples that were in memory. If it is higher, devices are not the bottleneck."""
WAIT_SHARE = 0.1
"""Share of the consumer's time. If it waits for less, reading is not the bottleneck."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Work of a dataset's reader between two snapshots.

    Attributes:
        seconds: time between the snapshots.
        samples: samples delivered.
        sample_bytes: bytes of samples delivered.
        cache_hits: delivered samples that were in memory already.
        requests: requests to devices.
        errors: failed reads, and samples with a wrong checksum.
        retries: reads that were repeated.
        phase_seconds: time of all reading threads together, by the names in ``PHASES``.
        wait_seconds: time that consumers of streams waited for batches.
    """

    seconds: float
    samples: int
    sample_bytes: int
    cache_hits: int
    requests: int
    errors: int
    retries: int
    phase_seconds: Mapping[str, float]
    wait_seconds: float

    @property
    def coalescing(self) -> float:
        """Samples read from devices, per request."""
        return (self.samples - self.cache_hits) / self.requests if self.requests else 0.0

    @property
    def hit_share(self) -> float:
        """Share of the samples that were in memory already, 0..1."""
        return self.cache_hits / self.samples if self.samples else 0.0

    @property
    def phase_shares(self) -> dict[str, float]:
        """Share of each phase in the reading threads' time, 0..1; empty if they spent none."""
        total = sum(self.phase_seconds.values())
        if total <= 0:
            return {}
        return {name: seconds / total for name, seconds in self.phase_seconds.items()}

    def rate(self, count: float) -> float:
        """Return a count divided by the seconds between the snapshots."""
        return count / self.seconds if self.seconds > 0 else 0.0


def activity(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> Activity:
    """Compare two snapshots of ``Dataset.stats``.

    Args:
        before: the first snapshot.
        after: the second snapshot.
        seconds: time between them.
    """

    def increase(name: str) -> int:
        return max(0, after.get(name, 0) - before.get(name, 0))

    return Activity(
        seconds=seconds,
        samples=increase("samples"),
        sample_bytes=increase("sample_bytes"),
        cache_hits=increase("cache_hits"),
        requests=increase("reads"),
        errors=increase("read_errors") + increase("checksum_errors"),
        retries=increase("retries"),
        phase_seconds={label: increase(name) / 1e9 for name, label in PHASES.items()},
        wait_seconds=increase("wait_ns") / 1e9,
    )


def latency_quantile(counts: Sequence[int], share: float) -> float:
    """Return the latency that a share of reads stayed below, in us; 0 without reads.

    It assumes that the latencies within a bucket are distributed evenly.

    Args:
        counts: ``latency`` of ``Dataset.member_stats``: number of reads below 2, 4, 8, ... us.
        share: share of the reads, 0..1.
    """
    wanted = share * sum(counts)
    seen = 0
    for bucket, count in enumerate(counts):
        if count and seen + count >= wanted:
            low = 2.0**bucket if bucket else 0.0
            return low + (2.0 ** (bucket + 1) - low) * max(0.0, wanted - seen) / count
        seen += count
    return 0.0


@dataclass(frozen=True, slots=True)
class MemberActivity:
    """Work of one member between two snapshots.

    Attributes:
        uri: URI of the member's device.
        lost: True if the member cannot be read at the second snapshot.
        reads: reads per second.
        read_bytes: bytes read per second.
        errors: failed reads between the snapshots.
        depth: reads in flight, on average.
        median_us: median latency of a read, in us.
        p99_us: 99th percentile of the latency of a read, in us.
        queue_pairs: queue pairs that the process has to the member's device now.
        queue_pairs_max: most queue pairs that the process may have to it.
    """

    uri: str
    lost: bool
    reads: float
    read_bytes: float
    errors: int
    depth: float
    median_us: float
    p99_us: float
    queue_pairs: int
    queue_pairs_max: int


def member_activity(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float
) -> MemberActivity:
    """Compare two snapshots of one entry of ``Dataset.member_stats``.

    The depth is the sum of latencies per second (Little's law).
    """
    old = before.get("latency", [0] * len(after["latency"]))
    counts = [max(0, new - old_count) for new, old_count in zip(after["latency"], old, strict=True)]
    elapsed = seconds if seconds > 0 else float("inf")
    return MemberActivity(
        uri=after["uri"],
        lost=after["lost"],
        reads=(after["reads"] - before.get("reads", 0)) / elapsed,
        read_bytes=(after["read_bytes"] - before.get("read_bytes", 0)) / elapsed,
        errors=after["errors"] - before.get("errors", 0),
        depth=(after["latency_ns"] - before.get("latency_ns", 0)) / 1e9 / elapsed,
        median_us=latency_quantile(counts, 0.5),
        p99_us=latency_quantile(counts, 0.99),
        queue_pairs=after["queue_pairs"],
        queue_pairs_max=after["queue_pairs_max"],
    )


_OF_PROCESS = ("pid", "uid", "socket")


def by_process(
    clients: Sequence[Mapping[str, Any]],
) -> dict[tuple[int, str], dict[str, Any]]:
    """Combine a snapshot's entries of the connections of each process, by process ID and socket.

    Processes of other PID namespaces have the process ID 0: those of one published socket count as
    one. Numbers are added up, except ``pid`` and ``uid``. ``datasets`` lists each name once.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for client in clients:
        process = found.setdefault(
            (client["pid"], client["socket"]),
            {**{name: client[name] for name in _OF_PROCESS}, "datasets": []},
        )
        for name, value in client.items():
            if name == "datasets":
                process[name] = sorted({*process[name], *value})
            elif name not in _OF_PROCESS:
                process[name] = process.get(name, 0) + value
    return found


def verdict(seen: Activity, waited_share: float) -> str:
    """Return a sentence that names the bottleneck of an input pipeline.

    Args:
        seen: work of the reader.
        waited_share: share of the consumer's time that it waited for batches, 0..1.
    """
    if seen.samples == 0:
        return "nothing was read"
    shares = seen.phase_shares
    if waited_share < WAIT_SHARE:
        return "the consumer is the limit: it hardly waits for samples"
    if seen.hit_share > HIT_SHARE:
        return "memory is the limit: nearly all samples were there already"
    if shares.get("rest", 0.0) > IDLE_SHARE:
        return "the consumer is the limit: reading rests most of the time"
    busy = {name: share for name, share in shares.items() if name != "rest"}
    longest = max(busy, key=lambda name: busy[name], default="device")
    reasons = {
        "device": "the device is the limit: reading mostly waits for it",
        "checking": "the processor is the limit: reading mostly computes checksums",
        "planning": "the processor is the limit: reading mostly finds and sorts samples",
    }
    return reasons[longest]
