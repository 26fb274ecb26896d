"""Imports by workers make the same volume as others, on devices of each kind.

``DLFS_IMPORT_FILES`` is the number of files (400 by default), ``DLFS_IMPORT_WORKERS`` the numbers
of workers ("2" by default), of which 0 is an import without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import dlfs
from dlfs.block import SharedNamespaceDevice
from dlfs.ingest.workers.by_workers import StartLauncher, WorkersOptions
from dlfs.ingest.workers.coordinator import GrantTimes
from dlfs.ingest.workers.launching import ProcessLauncher
from dlfs.ingest.workers.listening import Listener
from tests.contract.openers import LEASE_TIMES
from tests.spdk import target as spdk
from tests.support.equal_imports import (
    CHUNK_BYTES,
    VOLUME_BYTES,
    contents,
    import_folder,
    make_folder,
    make_volume,
)
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem

COUNTS = [int(word) for word in os.environ.get("DLFS_IMPORT_WORKERS", "2").split(",")]
KINDS = [
    pytest.param("file"),
    pytest.param("nvme-tcp"),
    pytest.param("spdk", marks=pytest.mark.spdk),  # SPDK's target by SPDK's initiator
    pytest.param("nvmf", marks=pytest.mark.spdk),  # SPDK's target by libdlfs's
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    plain = make_volume(tmp_path_factory.mktemp("plain") / "plain.img")
    import_folder(plain, folder)
    return contents(plain)


@contextmanager
def volume_of(kind: str, request: pytest.FixtureRequest, path: Path) -> Iterator[str]:
    """Make an empty volume on a device of a kind, and return its URI."""
    path.unlink(missing_ok=True)
    if kind == "file":
        yield make_volume(path)
        return
    with ExitStack() as stack:
        if kind == "nvme-tcp":
            subsystem = Subsystem(DEFAULT_NQN, [Namespace(VOLUME_BYTES)])
            uri = stack.enter_context(ScriptedTarget([subsystem])).uri()
        else:
            target: spdk.SpdkTarget = request.getfixturevalue("spdk_target")
            nqn = "nqn.2024-01.org.dlfs.test:workers"
            namespace = spdk.Namespace(VOLUME_BYTES, path=path)
            stack.enter_context(target.subsystem(nqn, [namespace]))
            uri = (target.spdk_uri if kind == "spdk" else target.tcp_uri)(nqn)
        dlfs.format_volume(uri, chunk_bytes=CHUNK_BYTES)
        yield uri


def start_by_tcp(
    stack: ExitStack, count: int, _times: GrantTimes
) -> tuple[Listener, ProcessLauncher]:
    """Start workers that join as those elsewhere do."""
    listener = stack.enter_context(Listener("127.0.0.1"))
    return listener, ProcessLauncher(count, listener.invitation)


@pytest.mark.parametrize("start", [None, start_by_tcp], ids=["processes", "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_volumes_are_equal(
    kind: str,
    start: StartLauncher | None,
    folder: Path,
    expected: tuple[object, ...],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedNamespaceDevice, "lease_times", LEASE_TIMES)
    for count in COUNTS:
        with volume_of(kind, request, tmp_path / "disk.img") as uri:
            import_folder(uri, folder, WorkersOptions(count, start=start) if count else 0)
            assert contents(uri) == expected, f"{count} workers"
