"""Makes the golden volumes of format 1.4, whose versions share chunks, and says what they hold.

Once released, neither ``contents()`` and ``columns()`` nor the archives in v1.4/ change.

    python -m tests.golden.make_v1_4 tests/golden/v1.4
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dlfs
from dlfs.units import KIB, MIB
from tests.golden.make_v1 import Contents, archive, datasets, fill, make_members, numbers

MEMBER_SIZES = {"grown": [2 * MIB], "growns": [3 * MIB, 3 * MIB]}
CHUNK_BYTES = {"grown": 4 * KIB, "growns": 16 * KIB}
REPLICAS = {"grown": 1, "growns": 2}
LABELS = {"grown": "", "growns": "what was appended"}

STEPS = 4
"""Versions of the dataset ``grown``; version 2 is removed."""


def step(number: int, chunk_bytes: int) -> dict[bytes, bytes]:
    """Samples that a version of ``grown`` adds."""
    added = {
        b"%d/" % (STEPS - number) + path: data for path, data in numbers(30, 500 * number).items()
    }
    return {**added, b"large/%d" % number: bytes([number]) * (2 * chunk_bytes + 100)}


def columns(name: bytes, paths: Sequence[bytes]) -> dict[str, list[Any]]:
    """Return the attributes of a dataset, by column, in the order of these paths."""
    if name != b"grown":
        return {}
    found: dict[str, list[Any]] = {"path": [path.decode() for path in paths]}
    found["length"] = [len(path) for path in paths]
    return found


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    samples: dict[bytes, bytes] = {}
    found: Contents = {}
    for number in range(1, STEPS + 1):
        samples = {**samples, **step(number, CHUNK_BYTES[kind])}
        found[b"grown", number] = samples
    del found[b"grown", 2]
    return {**found, **datasets(CHUNK_BYTES[kind])}


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
        for number in range(1, STEPS + 1):
            samples = step(number, CHUNK_BYTES[kind])
            with volume.writer("grown") if number == 1 else volume.append("grown") as writer:
                for path, data in samples.items():
                    row = {name: values[0] for name, values in columns(b"grown", [path]).items()}
                    writer.add(path, data, attributes=row)
        volume.remove("grown", 2)
    return members


if __name__ == "__main__":
    for kind in MEMBER_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            archive(write(kind, Path(scratch)), Path(sys.argv[1]) / f"{kind}.tar.xz")
