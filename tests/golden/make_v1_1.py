"""Makes the golden volumes of format 1.1, which have replicas, and says what they hold.

Once released, neither ``contents()`` nor the archives in v1.1/ change.

    python -m tests.golden.make_v1_1 tests/golden/v1.1
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import dlfs
from dlfs.units import KIB, MIB
from tests.golden.make_v1 import Contents, archive, datasets, fill, make_members

MEMBER_SIZES = {"pair": [2 * MIB] * 2, "trio": [3 * MIB, 2 * MIB + 12 * KIB, 2 * MIB]}
CHUNK_BYTES = {"pair": 4 * KIB, "trio": 16 * KIB}
REPLICAS = {"pair": 2, "trio": 2}
LABELS = {"pair": "two of each", "trio": ""}


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    return datasets(CHUNK_BYTES[kind])


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
    fill(members, contents(kind))
    return members


if __name__ == "__main__":
    for kind in MEMBER_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            archive(write(kind, Path(scratch)), Path(sys.argv[1]) / f"{kind}.tar.xz")
