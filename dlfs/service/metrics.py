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
from collections.abc import Callable, Iterator, Mapping
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
"""Counters as ``SampleServer.snapshot`` returns them."""

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
        yield GaugeMetricFamily(
            "dlfs_uptime_seconds", "time since the service started", found["uptime_s"]
        )
        processes = by_process(found["clients"])
        yield GaugeMetricFamily("dlfs_clients", "processes connected", len(processes))
        for name, about in _MEMORY.items():
            yield GaugeMetricFamily(f"dlfs_{name}", about, found["memory"][name])
        yield from _dataset_metrics(found["datasets"])
        yield from _member_metrics(found["datasets"])
        yield from _client_metrics(processes)

    def describe(self) -> list[Metric]:
        """Return no metrics: their labels depend on the datasets that are open."""
        return []


def _labels(dataset: Mapping[str, Any]) -> list[str]:
    return [dataset["volume"], dataset["dataset"], str(dataset["version"])]


def _dataset_metrics(datasets: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for name, about in _READER.items():
        counter = CounterMetricFamily(f"dlfs_{name}", about, labels=_DATASET)
        for dataset in datasets:
            counter.add_metric(_labels(dataset), dataset["reader"][_NAMES.get(name, name)])
        yield counter
    spent = CounterMetricFamily(
        "dlfs_reading_seconds", "time of reading by phase", labels=(*_DATASET, "phase")
    )
    memory = GaugeMetricFamily(
        "dlfs_cache_bytes", "memory for samples that the dataset holds", labels=_DATASET
    )
    users = GaugeMetricFamily(
        "dlfs_dataset_clients", "sessions that have the dataset open", labels=_DATASET
    )
    for dataset in datasets:
        for phase in _PHASES:
            nanoseconds = dataset["reader"][f"{phase}_ns"]
            spent.add_metric([*_labels(dataset), phase], nanoseconds / 1e9)
        memory.add_metric(_labels(dataset), dataset["cache_bytes"])
        users.add_metric(_labels(dataset), dataset["users"])
    yield from (spent, memory, users)


def _member_metrics(datasets: list[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = (*_DATASET, "member")
    seconds = HistogramMetricFamily(
        "dlfs_member_read_seconds", "latency of a member's reads", labels=labels
    )
    read_bytes = CounterMetricFamily(
        "dlfs_member_read_bytes", "bytes read from a member", labels=labels
    )
    errors = CounterMetricFamily(
        "dlfs_member_errors", "reads of a member that failed", labels=labels
    )
    lost = GaugeMetricFamily("dlfs_member_lost", "1 while the member cannot be read", labels=labels)
    for dataset in datasets:
        for member in dataset["members"]:
            named = [*_labels(dataset), member["uri"]]
            buckets = _buckets(member["latency"])
            seconds.add_metric(named, buckets, member["latency_ns"] / 1e9)
            read_bytes.add_metric(named, member["read_bytes"])
            errors.add_metric(named, member["errors"])
            lost.add_metric(named, int(member["lost"]))
    yield from (seconds, read_bytes, errors, lost)


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Return Prometheus' histogram buckets: upper bounds in seconds with cumulative counts."""
    total = 0
    found: list[tuple[str, float]] = []
    for bucket, count in enumerate(counts[:-1]):
        total += count
        found.append((repr(2 ** (bucket + 1) / 1e6), float(total)))
    return [*found, ("+Inf", float(total + counts[-1]))]


def _client_metrics(processes: Mapping[int, Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("pid", "uid")
    kinds: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], dict[str, str]], ...] = (
        (CounterMetricFamily, _CLIENT),
        (GaugeMetricFamily, _CLIENT_NOW),
    )
    for kind, names in kinds:
        for name, about in names.items():
            metric = kind(f"dlfs_client_{name}", about, labels=labels)
            for process in processes.values():
                named = [str(process["pid"]), str(process["uid"])]
                metric.add_metric(named, process.get(name, 0))
            yield metric


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
