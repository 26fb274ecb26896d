"""Imports of all kinds of sources that are killed at random moments, with their reads counted.

What is read in vain is what was in flight when the import was killed: samples that no step had yet.
ArrayRecord is left to ``test_seeking``: its library has threads, and cannot be used in forks.
The seed is printed; ``DLFS_IMPORT_KILLS`` is the number of kills of each kind (1 by default).
"""

from __future__ import annotations

import json
import os
import random
import signal
import tarfile
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.tables import json_lines
from tests.support.files import write_files
from tests.support.shards import write_mds
from tests.support.volumes import new_volume, read_dataset
from tests.unit.ingest import array_writers
from tests.unit.ingest.step_sources import GROUP, Made
from tests.unit.ingest.test_seeking import READS, opened_here
from tests.unit.ingest.test_tfrecord import frame

KILLS = int(os.environ.get("DLFS_IMPORT_KILLS", "1"))
SAMPLES = 40 * GROUP
LENGTH = 2000
STEP_BYTES = 100 * KIB
IN_FLIGHT = STEP_BYTES // LENGTH + 4 * 64 * KIB // LENGTH + 2 * GROUP
"""Samples of a step, of the blocks that are made and packed, and of units that are read in part."""
FORK = get_context("fork")

Contents = list[bytes]


def write_folder(place: Path, contents: Contents) -> Made:
    write_files(place / "folder", {f"{i % 9}/{i:04}": data for i, data in enumerate(contents)})
    return Made(place / "folder", "folder")


def write_tar(place: Path, contents: Contents) -> Made:
    folder = write_folder(place, contents).path
    with tarfile.open(place / "x.tar", "w") as archive:
        archive.add(folder, ".")
    return Made(place / "x.tar", "tar")


def write_parquet(place: Path, contents: Contents) -> Made:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"image": contents}), place / "x.parquet", row_group_size=GROUP)
    return Made(place / "x.parquet", "parquet")


def write_hdf5(place: Path, contents: Contents) -> Made:
    h5py = pytest.importorskip("h5py")
    rows = np.frombuffer(b"".join(contents), np.uint8).reshape(SAMPLES, LENGTH)
    with h5py.File(place / "x.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(GROUP, LENGTH))
    return Made(place / "x.h5", "hdf5")


def write_tfrecord(place: Path, contents: Contents) -> Made:
    (place / "x.tfrecord").write_bytes(b"".join(map(frame, contents)))
    return Made(place / "x.tfrecord", "tfrecord")


def write_zip(place: Path, contents: Contents) -> Made:
    with zipfile.ZipFile(place / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i, data in enumerate(contents):
            archive.writestr(f"{i % 9}/{i:04}", data)
    return Made(place / "x.zip", "zip")


def write_lmdb(place: Path, contents: Contents) -> Made:
    lmdb = pytest.importorskip("lmdb")
    with (
        lmdb.open(str(place / "x.lmdb"), 32 * MIB, subdir=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i, data in enumerate(contents):
            transaction.put(b"%04d" % i, data)
    return Made(place / "x.lmdb", "lmdb")


def write_json_lines(place: Path, contents: Contents) -> Made:
    pytest.importorskip("pyarrow")
    lines = [json.dumps({"text": data[: LENGTH // 2].hex()}) for data in contents]
    (place / "x.jsonl").write_text("\n".join([*lines, ""]))
    return Made(place / "x.jsonl", "jsonl")


def write_shards(place: Path, contents: Contents) -> Made:
    rows = [[data] for data in contents]
    return Made(write_mds(place, {"x": ("bytes", None)}, rows, shard_rows=GROUP), "mds")


def write_npy(place: Path, contents: Contents) -> Made:
    np.save(place / "x.npy", np.frombuffer(b"".join(contents), np.uint8).reshape(SAMPLES, LENGTH))
    return Made(place / "x.npy", "npy")


def write_zarr(place: Path, contents: Contents) -> Made:
    rows = np.frombuffer(b"".join(contents), np.uint8).reshape(SAMPLES, LENGTH)
    array_writers.write_zarr(place / "x.zarr", {"x": rows}, chunks=(GROUP, LENGTH))
    return Made(place / "x.zarr", "zarr")


MAKERS: dict[str, Callable[[Path, Contents], Made]] = {
    "folder": write_folder,
    "tar": write_tar,
    "parquet": write_parquet,
    "hdf5": write_hdf5,
    "tfrecord": write_tfrecord,
    "zip": write_zip,
    "lmdb": write_lmdb,
    "jsonl": write_json_lines,
    "mds": write_shards,
    "npy": write_npy,
    "zarr": write_zarr,
}


def import_source(volume: str, made: Made) -> None:
    with dlfs.open(volume) as target, closing(opened_here(made)) as source:
        import_dataset(target, source, "x", step_bytes=STEP_BYTES)


def places(volume: str) -> tuple[Any, ...]:
    with dlfs.open(volume) as target, target["x"] as dataset:
        assert len(read_dataset(target, "x")) == SAMPLES  # which verifies all of them
        directory = dataset.session.directory
        return directory.names(), directory.addresses().tolist(), directory.crcs().tolist()


def kept(volume: str) -> tuple[int, bool]:
    """Return the number of samples that the import has; and True if it is complete."""
    with dlfs.open(volume) as target:
        found = [*target.unfinished(), *target.datasets()]
        return sum(info.sample_count for info in found), "x" in target


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_is_read_twice_but_what_was_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    contents = [draw.randbytes(LENGTH) for _ in range(SAMPLES)]
    made = MAKERS[kind](tmp_path, contents)
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", GROUP * LENGTH)
    owner_of, name, measure, _ = READS[kind]
    owner = owner_of()
    read, count = getattr(owner, name), FORK.Value("q", 0)

    def counted(*arguments: Any, **named: Any) -> Any:
        with count.get_lock():
            count.value += measure(*arguments, **named)
        return read(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)
    layout = {"size_bytes": 16 * MIB, "chunk_bytes": 16 * KIB}
    whole, volume = (str(new_volume(tmp_path / name, **layout)) for name in ("whole", "volume"))
    begun = time.monotonic()
    import_source(whole, made)
    duration_s = time.monotonic() - begun
    assert count.value == SAMPLES
    kills, before, in_vain, is_complete = 0, 0, 0, False
    while kills < KILLS or not is_complete:
        count = FORK.Value("q", 0)
        child = FORK.Process(target=import_source, args=(volume, made))
        child.start()
        child.join(draw.uniform(0, duration_s) if kills < KILLS else None)
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        kills += child.exitcode != 0
        now, is_complete = kept(volume)
        assert before <= now
        assert count.value - (now - before) <= IN_FLIGHT
        in_vain += count.value - (now - before)
        before = now
        if is_complete:
            assert places(volume) == places(whole)
            if kills < KILLS:
                with dlfs.open(volume) as target:
                    target.remove("x")
                before = 0
    print(f"{kind}: {kills} kills, {in_vain} samples read in vain")
