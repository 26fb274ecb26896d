"""The metrics that a snapshot of the service becomes, scraped as Prometheus scrapes them."""

import urllib.request
from typing import Any

import pytest

from dlfs.errors import DeviceError, UsageError

prometheus = pytest.importorskip("prometheus_client.parser")

from dlfs.service.metrics import MetricsEndpoint, parse_address  # noqa: E402

SNAPSHOT: dict[str, Any] = {
    "started_s": 12.5,
    "clients": [
        {"pid": 7, "uid": 1000, "socket": "", "datasets": ["d"], "channels": 2, "samples": 10,
         "pinned_bytes": 4096, "batches": 3},
        {"pid": 7, "uid": 1000, "socket": "", "datasets": [], "channels": 1, "samples": 5},
    ],
    "memory": {"memory_bytes": 8000, "held_bytes": 5000, "readers": 2},
    "datasets": [
        {
            "volume": "2b1c",
            "dataset": 'odd "name"\n',
            "version": 3,
            "users": 2,
            "cache_bytes": 1 << 20,
            "reader": {
                "samples": 100, "sample_bytes": 4000, "cache_hits": 25, "reads": 30,
                "read_bytes": 5000, "checksum_errors": 1, "read_errors": 2, "retries": 3,
                "failovers": 4, "private_batches": 5, "plan_ns": 10**9, "device_ns": 2 * 10**9,
                "verify_ns": 0, "rest_ns": 0, "copy_ns": 0, "wait_ns": 5 * 10**8,
            },
            "members": [
                {"uri": "/a.img", "lost": False, "reads": 6, "read_bytes": 5000, "errors": 2,
                 "latency_ns": 3 * 10**6, "latency": [1, 2, 3]},
            ],
        }
    ],
}  # fmt: skip


@pytest.fixture
def scraped() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    endpoint = MetricsEndpoint("127.0.0.1:0", lambda: SNAPSHOT)
    try:
        with urllib.request.urlopen(endpoint.url, timeout=30) as answer:
            text = answer.read().decode()
    finally:
        endpoint.close()
        endpoint.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in prometheus.text_string_to_metric_families(text)
        for sample in family.samples
    }


DATASET = (("dataset", 'odd "name"\n'), ("version", "3"), ("volume", "2b1c"))


def member(**more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((*DATASET, ("member", "/a.img"), *more.items())))


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("dlfs_start_time_seconds", (), 12.5),
        ("dlfs_clients", (), 1),
        ("dlfs_memory_bytes", (), 8000),
        ("dlfs_held_bytes", (), 5000),
        ("dlfs_samples_total", DATASET, 100),
        ("dlfs_requests_total", DATASET, 30),
        ("dlfs_request_bytes_total", DATASET, 5000),
        ("dlfs_checksum_errors_total", DATASET, 1),
        ("dlfs_reading_seconds_total", tuple(sorted((*DATASET, ("phase", "device")))), 2.0),
        ("dlfs_reading_seconds_total", tuple(sorted((*DATASET, ("phase", "wait")))), 0.5),
        ("dlfs_cache_bytes", DATASET, 1 << 20),
        ("dlfs_member_read_seconds_count", member(), 6),
        ("dlfs_member_read_seconds_sum", member(), 0.003),
        ("dlfs_member_read_seconds_bucket", member(le="2e-06"), 1),
        ("dlfs_member_read_seconds_bucket", member(le="4e-06"), 3),
        ("dlfs_member_read_seconds_bucket", member(le="+Inf"), 6),
        ("dlfs_member_errors_total", member(), 2),
        ("dlfs_member_lost", member(), 0),
        ("dlfs_client_samples_total", (("pid", "7"), ("socket", ""), ("uid", "1000")), 15),
        ("dlfs_client_channels", (("pid", "7"), ("socket", ""), ("uid", "1000")), 3),
        ("dlfs_client_pinned_bytes", (("pid", "7"), ("socket", ""), ("uid", "1000")), 4096),
    ],
)
def test_a_scrape_has_the_values_of_the_snapshot(scraped, name, labels, value):
    assert scraped[name, labels] == value


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9100", ("127.0.0.1", 9100)),
        (":9100", ("0.0.0.0", 9100)),
        ("[::1]:0", ("::1", 0)),
        ("node.example:1", ("node.example", 1)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "9100", "host:", "host:99999", "::1:80", "host:80x"])
def test_text_that_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_an_address_in_use_is_a_device_error():
    endpoint = MetricsEndpoint("127.0.0.1:0", lambda: SNAPSHOT)
    try:
        address = endpoint.url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(DeviceError, match="serve metrics on"):
            MetricsEndpoint(address, lambda: SNAPSHOT)
    finally:
        endpoint.close()
