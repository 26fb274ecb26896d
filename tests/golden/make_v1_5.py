"""Makes the golden volumes of format 1.5, which have groups of members, and says what they hold.

Once released, neither ``contents()`` nor the archives in v1.5/ change.

    python -m tests.golden.make_v1_5 tests/golden/v1.5
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import dlfs
from dlfs.resizing.shrinking import _mark
from dlfs.store.transaction import Transaction
from dlfs.units import KIB, MIB
from tests.golden.make_v1 import Contents, archive, datasets, fill, make_members, numbers

MEMBER_SIZES = {
    "group": [2 * MIB, 2 * MIB, 3 * MIB],
    "groups": [2 * MIB, 3 * MIB, 2 * MIB, 3 * MIB, 3 * MIB],
}
CHUNK_BYTES = {"group": 4 * KIB, "groups": 16 * KIB}
REPLICAS = {"group": 1, "groups": 2}
LARGE = {"group": 100, "groups": 30}
"""Number of large samples: more than the first group has room for."""
LABELS = {"group": "grown by two", "groups": ""}


def later(kind: str) -> dict[bytes, bytes]:
    """Samples that were written after the volume was grown."""
    large = {b"large/%d" % i: bytes([i]) * (3 * CHUNK_BYTES[kind] + i) for i in range(LARGE[kind])}
    return {**numbers(120, 7), **large}


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    return {(b"later", 1): later(kind), **datasets(CHUNK_BYTES[kind])}


def write(kind: str, folder: Path) -> list[str]:
    """Write a golden volume with this code; returns the paths of its members, in order.

    ``group`` has a second group. The first group of ``groups`` was removed, so no chunk has number
    0; its second group is being evacuated, and has data.
    """
    members = make_members(folder, MEMBER_SIZES[kind])
    first, second = (members[:1], members[1:]) if kind == "group" else (members[3:], members[:3])
    dlfs.format_volume(
        first,
        chunk_bytes=CHUNK_BYTES[kind],
        block_bytes=4096,
        label=LABELS[kind],
        replicas=REPLICAS[kind],
    )
    fill(first, datasets(CHUNK_BYTES[kind]))
    with dlfs.open(first) as volume:
        volume.grow(second)
        if kind == "groups":
            volume.shrink(first)
            volume.grow(first, force=True)
        with volume.writer("blank") as writer:  # its chunks are free for the last commit
            writer.add("zeros", bytes(8 * CHUNK_BYTES[kind]))
        with volume.writer("later") as writer:
            for path, data in later(kind).items():
                writer.add(path, data)
        volume.remove("blank")
        assert any(
            group.has(run)
            for group in volume.session.superblock.geometry.all_groups[1:]
            for record in volume.session.catalog.datasets
            for run in record.data_runs
        )
        if kind == "groups":
            with volume._transaction("golden") as transaction:
                last = transaction.geometry.all_groups[-1]
                _mark(transaction.base, {last.first_chunk}, Transaction)
    return members


if __name__ == "__main__":
    for kind in MEMBER_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            archive(write(kind, Path(scratch)), Path(sys.argv[1]) / f"{kind}.tar.xz")
