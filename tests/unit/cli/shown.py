"""Prints output that is slow to produce: large counts, busy services, many devices.

The verbs' own functions print it. Only the statistics, which a service or a measurement would give,
are made up here, so that they are large and the same in every run.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from dlfs import DatasetInfo, MemberInfo, SuperblockInfo
from dlfs.block import parse_uri
from dlfs.cli.datasets import dataset_table
from dlfs.cli.output import print_data, print_text, stdout_console
from dlfs.cli.verbs import discover, info, stall, top
from dlfs.diagnosis.consuming import Run
from dlfs.service.statistics import activity, member_activity

ZERO = UUID(int=0)
WHEN = datetime(2000, 1, 2, 3, 4, tzinfo=UTC)
DATASETS = [
    "imagenet-21k-p-winter-2021-release-train-shuffled",
    "名前のとても長いデータセット",
    "cc12m",
]
URIS = [
    f"nvme-tcp://storage-{node}.cluster.example.org:4420/"
    f"nqn.2024-01.org.example:pool-7:disk-{node}?nsid=1&hostnqn=nqn.2024-01.org.example:trainer"
    for node in "abc"
]


def datasets() -> None:
    """Datasets with as many samples as there may be."""
    counts = (1_234_567_890_123, 14_197_122, 1)
    print_data(
        dataset_table(
            DatasetInfo(
                name=name,
                version=4_000_000_000 if number == 0 else number,
                uuid=ZERO,
                created=WHEN,
                sample_count=count,
                sample_bytes=count * 113_003,
                stored_bytes=count * 114_003,
                layout="shuffled",
                seed=7,
            )
            for number, (name, count) in enumerate(zip(DATASETS, counts, strict=True))
        )
    )


def members() -> None:
    """Members of a volume over several nodes, one of them damaged."""
    states = [("current", 123_456_789), ("previous", 123_456_788), ("damaged", None)]
    copies = tuple(
        SuperblockInfo(name, 0, generation, state, None)
        for name, (state, generation) in zip(("A", "B", "tail"), states, strict=True)
    )
    print_data(
        info._member_table(
            tuple(
                MemberInfo(number, ZERO, uri, 7_681_501_126_656, copies if number else ())
                for number, uri in enumerate(URIS)
            )
        )
    )


def namespaces() -> None:
    """Return the namespaces of a storage node."""
    from types import SimpleNamespace as Some

    superblock = Some(
        label="pool of the third floor", volume_uuid=ZERO, member_number=1,
        geometry=Some(member_count=12),
    )  # fmt: skip
    found: list[Any] = [
        Some(
            content=Some(superblock=superblock if number else None),
            namespace=Some(size_bytes=7_681_501_126_656, block_bytes=4096),
            uri=str(parse_uri(uri)),
        )
        for number, uri in enumerate(URIS)
    ]
    print_data(discover._table(found))


def _counters(scale: int) -> dict[str, int]:
    names = ("samples", "sample_bytes", "cache_hits", "reads", "read_bytes", "wait_ns", "copy_ns")
    found = {name: scale * (number + 3) for number, name in enumerate(names)}
    return found | {
        "sample_bytes": scale * 30_000, "read_bytes": scale * 32_000, "cache_hits": scale,
        "device_ns": scale * 700, "verify_ns": scale * 200, "plan_ns": scale * 60,
        "rest_ns": scale * 40, "read_errors": scale // 10**5, "checksum_errors": 0, "retries": 0,
    }  # fmt: skip


def _member(uri: str, scale: int) -> dict[str, Any]:
    latency = [0] * 4 + [scale] * 12 + [scale // 100] * 8
    return {
        "uri": uri, "lost": "disk-c" in uri, "reads": scale * 3, "read_bytes": scale * 90_000,
        "read_errors": scale // 10**5, "busy_ns": scale * 5_000, "latency": latency,
        "latency_ns": scale * 9_000_000, "errors": scale // 10**5, "timeouts": 0, "retries": 0,
        "queue_pairs": 5, "queue_pairs_max": 128,
    }  # fmt: skip


def stalled() -> None:
    """A measurement of ``dlfs stall``."""
    members = [member_activity(_member(uri, 0), _member(uri, 10**7), 10.0) for uri in URIS]
    seen = activity(_counters(0), _counters(10**7), 10.0)
    run = Run(10.0, 4.2, 1_234_567, seen, members)
    stall._print(f"{DATASETS[0]}@1234", run, "The device is the limit: reading waits for it 70%.")


def _answer(scale: int) -> dict[str, Any]:
    """An answer of a busy service."""
    clients = [
        {
            "pid": 4_194_303 - number, "uid": 65_534, "socket": "",
            "datasets": [f"{name}@1" for name in DATASETS],
            "channels": 16, "samples": scale * 5, "sample_bytes": scale * 40_000,
            "pinned_bytes": 17 << 30, "refusals": 12_345,
        }
        for number in range(2)
    ]  # fmt: skip
    return {
        "version": "0.1.0", "pid": 4_194_304, "uptime_s": 360_000.0 + scale, "clients": clients,
        "volumes": [{"uuid": str(ZERO), "label": "pool of the third floor"}],
        "memory": {"memory_bytes": 512 << 30, "held_bytes": 214 << 30, "readers": 2},
        "datasets": [
            {
                "uuid": str(number), "dataset": name, "version": 1234, "users": 128,
                "cache_bytes": 107 << 30, "reader": _counters(scale),
                "members": [_member(uri, scale) for uri in URIS],
            }
            for number, name in enumerate(DATASETS)
        ],
    }  # fmt: skip


def topped() -> None:
    """One look of ``dlfs top``."""
    stdout_console().print(top.screen(_answer(0), copy.deepcopy(_answer(10**6)), 1.0), crop=False)


def _importing() -> dict[str, Any]:
    """An answer of the coordinator of a large import by workers."""
    names = (
        "node-17.cluster.example.org:4194303",
        "node-18.cluster.example.org:12",
        "vm:1",
        "vm:2",
    )
    workers = [
        {
            "name": name, "part": None if number == 3 else 12_345 + number,
            "part_bytes": number << 29, "part_total": None if number == 3 else 2 << 30,
            "bytes_done": (1234 >> number) << 30, "bytes_per_second": 1.5e9 / 30**number,
            "is_straggler": number == 2,
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    return {
        "volume": "pool of the third floor", "pid": 4_194_304,
        "seconds": 36_000.0, "name": DATASETS[0], "parts": 51_200, "parts_done": 12_344,
        "samples": 1_234_567_890, "bytes": 24 << 40, "new_bytes": 20 << 40,
        "bytes_total": 100 << 40, "workers": workers,
    }  # fmt: skip


def topped_import() -> None:
    """One look of ``dlfs top`` at an import by workers."""
    found = {"imports": [_importing()]}
    stdout_console().print(top.screen(found, found, 1.0), crop=False)


def topped_both() -> None:
    """One look of ``dlfs top`` at a service, into one of whose volumes workers import."""
    found = {**_answer(10**6), "datasets": [], "imports": [_importing()]}
    stdout_console().print(top.screen(found, found, 1.0), crop=False)


def workers() -> None:
    """The workers below the bar of an import, and the note of a slow one."""
    from dlfs.cli.progress import describe_straggler, worker_table
    from dlfs.ingest.progress import WorkerProgress

    found = [WorkerProgress(**each) for each in _importing()["workers"]]
    print_data(worker_table(found))
    print()
    print_text(describe_straggler(found[2]))


def progress() -> None:
    """Progress bars in mid-way; the total of one is not known."""
    from types import SimpleNamespace as Some

    from dlfs.cli.progress import _row

    for done, total, speed, left in (
        (123 << 30, 1000 << 30, 1 << 30, 877.0),
        (5, None, None, None),
    ):
        task: Any = Some(
            description=f"import {DATASETS[0]}", completed=done, total=total, speed=speed,
            time_remaining=left, fields={"detail": "1,234,567,890 samples"},
        )  # fmt: skip
        print_data(_row(task))


def topped_live() -> None:
    """``dlfs top`` of a busy service as a terminal of any height shows it."""
    from rich.live import Live

    console = stdout_console()
    seen = top.screen(_answer(0), _answer(10**6), 1.0, rows=console.height)
    with Live(seen, console=console, screen=True, auto_refresh=False):
        pass
