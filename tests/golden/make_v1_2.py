"""Makes the golden volumes of format 1.2, whose datasets have attributes, and says what they hold.

Once released, neither ``contents()`` and ``columns()`` nor the archives in v1.2/ change.

    python -m tests.golden.make_v1_2 tests/golden/v1.2
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import dlfs
from dlfs.units import KIB, MIB
from tests.golden.make_v1 import Contents, archive, datasets, make_members
from tests.odd_names import old_writer

Columns = dict[str, list[Any]]

MEMBER_SIZES = {"solo": [2 * MIB], "twins": [3 * MIB, 3 * MIB]}
CHUNK_BYTES = {"solo": 4 * KIB, "twins": 16 * KIB}
REPLICAS = {"solo": 1, "twins": 2}
LABELS = {"solo": "columns", "twins": ""}

NUMBERS = {
    "small": np.int8, "short": np.int16, "int": np.int32, "long": np.int64,
    "unsigned small": np.uint8, "unsigned short": np.uint16, "unsigned int": np.uint32,
    "unsigned long": np.uint64, "half": np.float16, "single": np.float32, "double": np.float64,
}  # fmt: skip


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    return datasets(CHUNK_BYTES[kind])


def value(name: str, place: int) -> Any:
    """A number of a column: the extremes of its type first, NaN among those that have it."""
    dtype = np.dtype(NUMBERS[name])
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    special = [limits.min, limits.max, dtype.type("nan") if dtype.kind == "f" else dtype.type(1)]
    return dtype.type(special[place]) if place < len(special) else dtype.type(place % 100)


def columns(name: bytes, paths: Sequence[bytes]) -> Columns:
    """Return the attributes of a dataset, by column, in the order of these paths."""
    places = range(len(paths))
    if name == b"numbers":
        found: Columns = {column: [value(column, place) for place in places] for column in NUMBERS}
        found["even"] = [place % 2 == 0 for place in places]
        found["class"] = [path.split(b"/")[0].decode() for path in paths]
        found["caption"] = [f"Bild {place} für {path.decode()}" * (place % 3) for place, path in
                            enumerate(paths)]  # fmt: skip
        found["dlfs:dtype"] = ["|u1" for _ in places]
        found["dlfs:shape"] = ["" if place % 7 else "2,10" for place in places]
        return found
    if name == b"odd \xff":
        return {"n" * 255: list(places), "字": ["" for _ in places]}
    return {}


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
    with dlfs.open(members) as volume:
        for (name, version), samples in contents(kind).items():
            paths = sorted(samples)
            rows = columns(name, paths)
            with (
                # Such volumes were made before writers compared reserved columns with samples.
                patch("dlfs.writer.check_reserved"),
                old_writer(volume, name, seed=version) as writer,
            ):
                for path in sorted(paths, key=lambda path: path[::-1]):
                    place = paths.index(path)
                    attributes = {column: values[place] for column, values in rows.items()}
                    writer.add(path, samples[path], attributes=attributes)
    return members


if __name__ == "__main__":
    for kind in MEMBER_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            archive(write(kind, Path(scratch)), Path(sys.argv[1]) / f"{kind}.tar.xz")
