"""What ``--workers`` stands for."""

from __future__ import annotations

import pytest

from dlfs.errors import UsageError
from dlfs.ingest.workers.engines import ProcessWorkers, RayWorkers, Workers, parse_workers

CLIENT = "ray://head:10001"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", ProcessWorkers(4)),
        ("ray", RayWorkers("auto", None, 1.0, {})),
        ("ray:local", RayWorkers("local", None, 1.0, {})),
        ("ray:10.0.0.1:6379?workers=8", RayWorkers("10.0.0.1:6379", 8, 1.0, {})),
        (CLIENT, RayWorkers(CLIENT, None, 1.0, {})),
        (
            f"{CLIENT}?cpus=0.5&resource=fast:1&resource=disk:2",
            RayWorkers(CLIENT, None, 0.5, {"fast": 1.0, "disk": 2.0}),
        ),
    ],
)
def test_workers(text: str, expected: Workers) -> None:
    assert parse_workers(text) == expected


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("ray", None, 0),
        ("ray:local", None, 0),
        ("ray:10.0.0.1:6379", "10.0.0.1", 6379),
        ("ray://[fd00::2]:10001", "fd00::2", 10001),
    ],
)
def test_the_host_of_a_cluster(address: str, host: str | None, port: int) -> None:
    found = parse_workers(address)
    assert isinstance(found, RayWorkers)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "0", "-1", "1025", "9" * 30, "four", "٤", "", "spark", "ray:", "ray:head", "ray://head",
        "ray://head:10001/x", "ray?workers=0", "ray?workers", "ray?cpu=1", "ray?cpus=-1",
        "ray?cpus=nan", "ray?resource=fast", "ray?",
    ],
)  # fmt: skip
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--workers .*expected"):
        parse_workers(text)
