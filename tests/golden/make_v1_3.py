"""Makes the golden volumes of format 1.3, which had datasets removed, and says what they hold.

Once released, neither ``contents()`` and ``REMOVED`` nor the archives in v1.3/ change.

    python -m tests.golden.make_v1_3 tests/golden/v1.3
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import dlfs
from dlfs.units import KIB, MIB
from tests.golden.make_v1 import Contents, archive, datasets, fill, make_members, numbers

MEMBER_SIZES = {"heir": [2 * MIB], "heirs": [3 * MIB, 3 * MIB]}
CHUNK_BYTES = {"heir": 4 * KIB, "heirs": 16 * KIB}
REPLICAS = {"heir": 1, "heirs": 2}
LABELS = {"heir": "", "heirs": "what went before"}

REMOVED = {b"removed": 1, b"again": 2, b"gone": 1}
"""Highest version that was removed of each name."""


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    return {(b"again", 3): numbers(20, 3000), **datasets(CHUNK_BYTES[kind])}


def write(kind: str, folder: Path) -> list[str]:
    """Write a golden volume with this code; returns the paths of its members, in order."""
    members = make_members(folder, MEMBER_SIZES[kind])
    dlfs.format_volume(
        members,
        chunk_bytes=CHUNK_BYTES[kind],
        block_bytes=4096,
        label=LABELS[kind],
        replicas=REPLICAS[kind],
    )
    fill(members, datasets(CHUNK_BYTES[kind]))
    with dlfs.open(members) as volume:
        for name, version in (("gone", 1), ("again", 1), ("again", 2), ("again", 3)):
            with volume.writer(name) as writer:
                for path, data in numbers(20, 1000 * version).items():
                    writer.add(path, data)
            if version < 3:
                volume.remove(name)
    return members


if __name__ == "__main__":
    for kind in MEMBER_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            archive(write(kind, Path(scratch)), Path(sys.argv[1]) / f"{kind}.tar.xz")
