"""Storage nodes for tests: scripted targets that serve the files of volumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import dlfs
from tests.support.nvme import DiscoveryRecord, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import write_dataset

SAMPLES = {b"%03d" % number: bytes([number % 251]) * (100 + 37 * number) for number in range(200)}


def make_volume(folder: Path, name: str, member_count: int, **options) -> tuple[UUID, list[Path]]:
    """A volume with dataset ``small`` on files, its UUID and its members' files."""
    paths = [folder / f"{name}-{number}.img" for number in range(member_count)]
    uri = ",".join(map(str, paths))
    info = dlfs.format_volume(uri, size_bytes=8 << 20, chunk_bytes=16384, label=name, **options)
    write_dataset(uri, "small", SAMPLES)
    return info.uuid, paths


def serve(path: Path, nsid: int = 1) -> Namespace:
    """A namespace that is a file."""
    return Namespace(path.stat().st_size, nsid=nsid, path=path)


def empty(nsid: int = 1) -> Namespace:
    """A namespace of zeros."""
    return Namespace(1 << 20, nsid=nsid)


def subsystem(name: str, namespaces: Sequence[Namespace], **options) -> Subsystem:
    """A subsystem with a short name."""
    return Subsystem(nqn(name), namespaces, **options)


def nqn(name: str) -> str:
    return f"nqn.2024-01.org.example:{name}"


def asking(*targets: ScriptedTarget, options: str = "") -> str:
    """The URI of whatever these targets list."""
    query = f"?{options}" if options else ""
    return ",".join(f"nvme-tcp+discover://127.0.0.1:{target.port}{query}" for target in targets)


class OddRecord(DiscoveryRecord):
    """A record with some bytes of its page replaced."""

    def __init__(self, record: DiscoveryRecord, changes: dict[int, bytes]) -> None:
        super().__init__(record.nqn, record.address, record.port, record.port_id, record.referral)
        object.__setattr__(self, "changes", changes)

    def encode(self) -> bytes:
        page = bytearray(super().encode())
        for at, data in self.changes.items():  # type: ignore[attr-defined]
            page[at : at + len(data)] = data
        return bytes(page)
