"""A folder that is imported with workers and without, and a check that the volumes are equal.

``DLFS_IMPORT_FILES`` is the number of its files (400 by default).
"""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.ingest.workers.by_workers import WorkersOptions
from tests.support.files import write_files
from tests.support.volumes import new_volume

FILES = int(os.environ.get("DLFS_IMPORT_FILES", "400"))
FILE_BYTES = max(3000, 12_000_000 // FILES)
"""Length of the largest file; the mean is half of it."""
CHUNK_BYTES = 16 * KIB
VOLUME_BYTES = 16 * MIB + 2 * FILES * FILE_BYTES
STEP_BYTES = max(512 * KIB, FILES * FILE_BYTES // 60)


def make_folder(path: Path) -> Path:
    drawn = random.Random(3)
    files = {f"{n % 9}/{n:06}": drawn.randbytes(drawn.randint(0, FILE_BYTES)) for n in range(FILES)}
    return write_files(path, files)


def make_volume(path: Path) -> str:
    return str(new_volume(path, size_bytes=VOLUME_BYTES, chunk_bytes=CHUNK_BYTES))


def import_folder(
    volume: str, folder: Path, workers: WorkersOptions | int = 0, *, step_bytes: int = STEP_BYTES
) -> ImportReport:
    with dlfs.open(volume) as target, closing(open_source(folder)) as source:
        source.buffer_bytes = 64 * KIB
        return import_dataset(target, source, "x", step_bytes=step_bytes, workers=workers)


def contents(volume: str) -> tuple[object, ...]:
    """Return what equal volumes have in common, after a check of all of their data."""
    with dlfs.open(volume) as opened:
        assert not [*opened.verify()]
        assert not opened.unfinished()
        (info,) = opened.versions("x")
        usage = opened.usage()
    return (
        info.sample_count,
        info.sample_bytes,
        info.content_digest,
        info.packing_digest,
        usage.media_bytes,
        usage.unfinished_bytes,
        usage.capacity_bytes - usage.free_bytes,
    )
