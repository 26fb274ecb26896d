"""An import of objects through a spool smaller than they are, killed at random moments.

The seed is printed; ``DLFS_SPOOL_OBJECTS``, ``DLFS_SPOOL_KILLS`` and ``DLFS_SPOOL_BYTES`` are the
numbers of objects and kills, and the bound of the spool.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.remote.stores import REQUESTS
from tests.support.processes import PROCESSES, preload
from tests.support.volumes import new_volume
from tests.unit.ingest.remote.object_store import BUCKET, ObjectStore, object_store
from tests.unit.ingest.remote.test_s3 import complete_keys
from tests.unit.ingest.remote.watching import run_watched
from tests.unit.ingest.test_steps import everything

__all__ = ["object_store"]
OBJECTS = int(os.environ.get("DLFS_SPOOL_OBJECTS", "400"))
KILLS = int(os.environ.get("DLFS_SPOOL_KILLS", "3"))
SPOOL_BYTES = int(os.environ.get("DLFS_SPOOL_BYTES", str(1 * MIB)))
URL = f"s3://{BUCKET}/train"
preload("s3fs", "dlfs.ingest.formats.folder", run_watched.__module__)


def put_objects(store: ObjectStore, folder: Path, draw: random.Random) -> int:
    """Store objects of 1 KiB to 1 MiB, most of them small, and files of them; return their size."""
    total = 0
    block = draw.randbytes(2 * MIB)
    for number in range(OBJECTS):
        most = min(MIB, SPOOL_BYTES // 4) if number % 100 == 7 else 16 * KIB
        start, size = draw.randrange(MIB), draw.randrange(KIB, most + 1)
        data = block[start : start + size]
        name = f"c{number % 50:02}/{number:06}.bin"
        store.put(f"train/{name}", data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        total += size
    return total


@pytest.mark.slow
def test_no_object_is_fetched_twice_but_those_in_flight(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder, spool, most = tmp_path / "train", tmp_path / "spool", tmp_path / "most"
    total = put_objects(object_store, folder, draw)
    layout = {"size_bytes": 2 * total + 32 * MIB, "chunk_bytes": 64 * KIB}
    whole, volume, local = (
        str(new_volume(tmp_path / name, **layout)) for name in ("whole", "volume", "local")
    )
    every = max(1, OBJECTS // 100)

    def start(target: str) -> PROCESSES.Process:  # type: ignore[name-defined]
        arguments = object_store.environment, URL, target, str(spool), SPOOL_BYTES, every, str(most)
        process = PROCESSES.Process(target=run_watched, args=arguments)
        process.start()
        return process

    begun = time.monotonic()
    process = start(whole)
    process.join()
    assert process.exitcode == 0
    seconds = time.monotonic() - begun
    assert object_store.gets == Counter(dict.fromkeys(object_store.gets, 1))
    assert object_store.gets.total() == OBJECTS
    object_store.gets.clear()
    complete: set[str] = set()
    kept: list[int] = []
    for place in [*sorted(draw.sample(range(OBJECTS), KILLS)), None]:
        before = object_store.gets.copy()
        process = start(volume)
        while place is not None and object_store.gets.total() < place:
            with object_store.counted:
                object_store.counted.wait(timeout=1)
            assert process.is_alive()
        if place is not None:
            time.sleep(draw.uniform(0, 0.05))  # the moment is random
            process.kill()
        process.join()
        assert process.exitcode == (0 if place is None else -signal.SIGKILL)
        assert not {key for key in object_store.gets - before if key in complete}
        complete |= complete_keys(spool)
        with dlfs.open(volume) as target:
            kept += [info.sample_count for info in target.unfinished()]
    twice = object_store.gets.total() - OBJECTS
    assert twice <= KILLS * REQUESTS
    assert list(spool.iterdir()) == []
    most_bytes = max(map(int, most.read_text().split()))
    assert SPOOL_BYTES // 2 < most_bytes <= SPOOL_BYTES
    assert kept == sorted(kept)
    found = everything(volume)
    assert found == everything(whole)
    with (
        dlfs.open(local) as target,
        closing(open_source(folder, format_name="imagefolder")) as source,
    ):
        import_dataset(target, source, "x")
    expected = everything(local)
    for part in (0, 2, 3, 5, 6, 7):  # all but places, which depend on where steps end
        assert found[part] == expected[part]
    print(
        f"{OBJECTS} objects, {total} bytes, in {seconds:.0f} s; {KILLS} kills, after which "
        f"{twice} objects were fetched again; the spool took at most {most_bytes} of {SPOOL_BYTES}"
    )
