"""Exports the service's counters to Prometheus (``GET /metrics``).

Prometheus computes rates from the counters. IOPS are ``rate(dlfs_member_read_seconds_count)``. The
mean queue depth is ``rate(dlfs_member_read_seconds_sum)``. The coalescing factor is the rate of
``dlfs_samples_total`` less the rate of ``dlfs_cache_hits_total``, divided by the rate of
``dlfs_requests_total``.

Threads: prometheus-client serves scrapes in its threads; a scrape takes a snapshot of the counters
and blocks no client.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dlfs.errors import DeviceError, UsageError
from dlfs.service.statistics import by_process

Snapshot = Mapping[str, Any]
"""Counters as ``ServerState.snapshot`` returns them."""

_READER = {
    "samples": "samples delivered",
    "sample_bytes": "bytes of samples delivered",
    "cache_hits": "delivered samples that were in memory already",
    "requests": "requests to devices",
    "request_bytes": "bytes requested from devices",
    "checksum_errors": "samples read with a wrong checksum",
    "read_errors": "reads that failed",
    "retries": "reads that were repeated",
    "failovers": "reads of another replica than the first",
    "private_batches": "batches that did not fit in the cache",
}
_NAMES = {"requests": "reads", "request_bytes": "read_bytes"}
"""libdlfs' names of counters that differ from the metric's name."""
_PHASES = ("plan", "device", "verify", "rest", "copy", "wait")
_CLIENT = {
    "samples": "samples delivered to a client",
    "sample_bytes": "bytes of samples delivered to a client",
    "batches": "batches delivered to a client",
    "refusals": "batches refused because the client reached its limits",
    "failures": "samples that could not be delivered to a client",
    "sleeps": "times that a client's channels waited for work",
    "wakes": "system calls that woke a client",
}
_CLIENT_NOW = {
    "channels": "open channels of a client",
    "pinned_bytes": "bytes of the cache that a client's batches pin",
    "batches_out": "batches that a client has not released",
}
_MEMORY = {
    "memory_bytes": "bound of the memory for samples of all datasets",
    "held_bytes": "memory for samples that datasets hold",
}
_DATASET = ("volume", "dataset", "version")
_PROCESS = ("pid", "uid", "socket")
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:]*)):(?P<port>[0-9]{1,5})")


class SnapshotCollector(Collector):
    """Converts a snapshot of the service to metrics at each scrape.

    Args:
        snapshot: returns the service's counters; called from any thread.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, from a new snapshot."""
        found = self._snapshot()
        processes = by_process(found["clients"])
        yield GaugeMetricFamily(
            "dlfs_start_time_seconds", "Unix time at which the service started", found["started_s"]
        )
        yield GaugeMetricFamily("dlfs_clients", "processes connected", len(processes))
        for name, about in _MEMORY.items():
            yield GaugeMetricFamily(f"dlfs_{name}", about, found["memory"][name])
        datasets = [
            ((each["volume"], each["dataset"], str(each["version"])), each)
            for each in found["datasets"]
        ]
        yield from _dataset_metrics(datasets)
        yield from _member_metrics(
            [((*key, m["uri"]), m) for key, each in datasets for m in each["members"]]
        )
        clients = [
            (tuple(str(each[name]) for name in _PROCESS), each) for each in processes.values()
        ]
        for kind, names in ((CounterMetricFamily, _CLIENT), (GaugeMetricFamily, _CLIENT_NOW)):
            for name, about in names.items():
                values = ((key, each.get(name, 0)) for key, each in clients)
                yield _family(kind, f"client_{name}", about, _PROCESS, values)

    def describe(self) -> list[Metric]:
        """Return no metrics: their labels depend on the datasets that are open."""
        return []


_Counted = Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]
"""Counters, each with the values of its labels."""


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    about: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric with a value for each tuple of values of its labels."""
    family = kind(f"dlfs_{name}", about, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def _dataset_metrics(datasets: _Counted) -> Iterator[Metric]:
    for name, about in _READER.items():
        values = ((key, each["reader"][_NAMES.get(name, name)]) for key, each in datasets)
        yield _family(CounterMetricFamily, name, about, _DATASET, values)
    spent = (
        ((*key, phase), each["reader"][f"{phase}_ns"] / 1e9)
        for key, each in datasets
        for phase in _PHASES
    )
    about = "time of reading by phase"
    yield _family(CounterMetricFamily, "reading_seconds", about, (*_DATASET, "phase"), spent)
    for name, field, about in (
        ("cache_bytes", "cache_bytes", "memory for samples that the dataset holds"),
        ("dataset_clients", "users", "sessions that have the dataset open"),
    ):
        values = ((key, each[field]) for key, each in datasets)
        yield _family(GaugeMetricFamily, name, about, _DATASET, values)


def _member_metrics(members: _Counted) -> Iterator[Metric]:
    labels = (*_DATASET, "member")
    seconds = HistogramMetricFamily(
        "dlfs_member_read_seconds", "latency of a member's reads", labels=labels
    )
    for key, member in members:
        seconds.add_metric(key, _buckets(member["latency"]), member["latency_ns"] / 1e9)
    yield seconds
    for kind, name, about in (
        (CounterMetricFamily, "read_bytes", "bytes read from a member"),
        (CounterMetricFamily, "errors", "reads of a member that failed"),
        (GaugeMetricFamily, "lost", "1 while the member cannot be read"),
    ):
        values = ((key, int(member[name])) for key, member in members)
        yield _family(kind, f"member_{name}", about, labels, values)


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Return Prometheus' histogram buckets: upper bounds in seconds with cumulative counts."""
    bounds = [*(repr(2 ** (bucket + 1) / 1e6) for bucket in range(len(counts) - 1)), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts)), strict=True))


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``:PORT`` (all addresses) or ``[IPV6]:PORT``.

    Raises:
        UsageError: the text has another form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 0xFFFF:
        raise UsageError(f"serve metrics: expected HOST:PORT, got {text!r}")
    return match["ipv6"] or match["host"] or "0.0.0.0", int(match["port"])


class MetricsEndpoint:
    """Answers ``GET /metrics`` until it is closed.

    Args:
        address: ``HOST:PORT``; port 0 chooses a free port.
        snapshot: returns the service's counters; called from any thread.

    Attributes:
        url: URL of the metrics.

    Raises:
        UsageError: the address is malformed.
        DeviceError: the endpoint cannot listen on the address.
    """

    def __init__(self, address: str, snapshot: Callable[[], Snapshot]) -> None:
        host, port = parse_address(address)
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(snapshot))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            code = error.errno or errno.EADDRNOTAVAIL
            raise DeviceError(f"serve metrics on {address}: {error}", code) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
