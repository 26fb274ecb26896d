"""What the counters of readers say between two looks at them: rates, latencies, where time goes.

A figure is a plain dict as ``Dataset.stats`` and ``Dataset.member_stats`` give them, from this
process or from a service. ``dlfs stall`` and ``dlfs top`` print what is computed here.
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
"""What those who read spend time on, by the counter's name."""

REST_SHARE = 0.5
"""Of reading: who rests this much waits for the consumer, not the other way round."""
HIT_SHARE = 0.95
"""Of samples: when more were in memory, the devices hardly matter."""
WAIT_SHARE = 0.1
"""Of the consumer's time: who waits less is not held up by reading."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a dataset's reader did between two looks.

    Attributes:
        seconds: between them.
        samples: given out.
        sample_bytes: of them.
        cache_hits: samples that were in memory already.
        requests: to devices.
        request_bytes: of them.
        errors: reads that failed, and samples with a wrong checksum.
        retries: reads that were tried again.
        phase_seconds: of all who read together, by the names in ``PHASES``.
        wait_seconds: that consumers of streams waited.
        copy_seconds: spent on copying samples out of batches.
    """

    seconds: float
    samples: int
    sample_bytes: int
    cache_hits: int
    requests: int
    request_bytes: int
    errors: int
    retries: int
    phase_seconds: Mapping[str, float]
    wait_seconds: float
    copy_seconds: float

    @property
    def coalescing(self) -> float:
        """Samples that came from devices, per request."""
        return (self.samples - self.cache_hits) / self.requests if self.requests else 0.0

    @property
    def hit_share(self) -> float:
        """Of the samples, those that were in memory."""
        return self.cache_hits / self.samples if self.samples else 0.0

    @property
    def phase_shares(self) -> dict[str, float]:
        """Of the time of those who read; empty when nobody did."""
        total = sum(self.phase_seconds.values())
        if total <= 0:
            return {}
        return {name: seconds / total for name, seconds in self.phase_seconds.items()}

    def rate(self, count: float) -> float:
        """Of something a second."""
        return count / self.seconds if self.seconds > 0 else 0.0


def activity(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> Activity:
    """Compare two looks at ``Dataset.stats``.

    Args:
        before: the first.
        after: the second.
        seconds: between them.
    """

    def grown(name: str) -> int:
        return max(0, after.get(name, 0) - before.get(name, 0))

    return Activity(
        seconds=seconds,
        samples=grown("samples"),
        sample_bytes=grown("sample_bytes"),
        cache_hits=grown("cache_hits"),
        requests=grown("reads"),
        request_bytes=grown("read_bytes"),
        errors=grown("read_errors") + grown("checksum_errors"),
        retries=grown("retries"),
        phase_seconds={label: grown(name) / 1e9 for name, label in PHASES.items()},
        wait_seconds=grown("wait_ns") / 1e9,
        copy_seconds=grown("copy_ns") / 1e9,
    )


def latency_quantile(counts: Sequence[int], share: float) -> float:
    """The latency that a share of reads stayed below, in us; 0 without reads.

    Args:
        counts: ``latency`` of ``Dataset.member_stats``: of reads below 2, 4, 8, ... us.
        share: 0..1.

    Within a bucket, latencies are taken to be spread evenly.
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
    """What one member did between two looks.

    Attributes:
        uri: of its device.
        lost: now.
        reads: a second.
        read_bytes: a second.
        errors: since the first look.
        depth: reads in flight, on average.
        median_us: latency of a read.
        p99_us: likewise, of all but the slowest of a hundred.
        queue_pairs: of the process to the member's device, now.
        queue_pairs_max: that it may have.
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
    """Compare two looks at one entry of ``Dataset.member_stats``.

    The depth is the sum of latencies a second (Little's law).
    """
    old = before.get("latency", [0] * len(after["latency"]))
    counts = [max(0, new - old_count) for new, old_count in zip(after["latency"], old, strict=True)]
    span = seconds if seconds > 0 else float("inf")
    return MemberActivity(
        uri=after["uri"],
        lost=after["lost"],
        reads=(after["reads"] - before.get("reads", 0)) / span,
        read_bytes=(after["read_bytes"] - before.get("read_bytes", 0)) / span,
        errors=after["errors"] - before.get("errors", 0),
        depth=(after["latency_ns"] - before.get("latency_ns", 0)) / 1e9 / span,
        median_us=latency_quantile(counts, 0.5),
        p99_us=latency_quantile(counts, 0.99),
        queue_pairs=after["queue_pairs"],
        queue_pairs_max=after["queue_pairs_max"],
    )


def by_process(clients: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Put the connections of a process together; of those that a snapshot lists, by pid.

    Numbers are added up, but for ``pid`` and ``uid``; ``datasets`` are the names, each once.
    """
    found: dict[int, dict[str, Any]] = {}
    for client in clients:
        process = found.setdefault(
            client["pid"], {"pid": client["pid"], "uid": client["uid"], "datasets": []}
        )
        for name, value in client.items():
            if name == "datasets":
                process[name] = sorted({*process[name], *value})
            elif name not in ("pid", "uid"):
                process[name] = process.get(name, 0) + value
    return found


def verdict(seen: Activity, waited_share: float) -> str:
    """Say in a sentence what limits an input pipeline.

    Args:
        seen: what the reader did.
        waited_share: of the consumer's time that it waited for batches, 0..1.
    """
    if seen.samples == 0:
        return "nothing was read"
    shares = seen.phase_shares
    if waited_share < WAIT_SHARE:
        return "the consumer is the limit: it hardly waits for samples"
    if seen.hit_share > HIT_SHARE:
        return "memory is the limit: nearly all samples were there already"
    if shares.get("rest", 0.0) > REST_SHARE:
        return "the consumer is the limit: reading rests most of the time"
    busy = {name: share for name, share in shares.items() if name != "rest"}
    longest = max(busy, key=lambda name: busy[name], default="device")
    reasons = {
        "device": "the device is the limit: reading mostly waits for it",
        "checking": "the processor is the limit: reading mostly computes checksums",
        "planning": "the processor is the limit: reading mostly finds and sorts samples",
    }
    return reasons[longest]
