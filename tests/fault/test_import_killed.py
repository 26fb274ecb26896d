"""An import in steps that is killed at random moments, while others write to its volume.

The seed is printed; ``DLFS_IMPORT_KILLS`` is the number of kills (10 by default).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.store.locking import when_unlocked
from tests.support.files import write_files
from tests.support.volumes import new_volume, read_dataset, write_dataset

KILLS = int(os.environ.get("DLFS_IMPORT_KILLS", "10"))
STEP_BYTES = 128 * KIB
FORK = get_context("fork")


def import_folder(volume: str, folder: Path) -> None:
    def once() -> None:
        with dlfs.open(volume) as target, closing(open_source(folder)) as source:
            source.buffer_bytes = 32 * KIB
            import_dataset(target, source, "x", step_bytes=STEP_BYTES)

    when_unlocked(once, 60)


def repeat(volume: str, change: Callable[[dlfs.Volume, int], None], stop: Any) -> None:
    """Change the volume again and again, as long as the test runs."""
    number = 0
    while not stop.is_set():

        def once(number: int = number) -> None:
            with dlfs.open(volume) as target:
                change(target, number)

        when_unlocked(once, 60)
        number += 1
        stop.wait(0.01)


def save(target: dlfs.Volume, number: int) -> None:
    """Save a checkpoint, and keep the last two."""
    write_dataset(target, "checkpoint", {"weights": bytes([number % 256]) * 18_000})
    target.prune("checkpoint", keep=2)


def copy(target: dlfs.Volume, number: int) -> None:
    """Copy a dataset in steps, or remove the copy."""
    if number % 2:
        target.remove("copy")
        return
    with target["base"] as dataset:
        dlfs.copy_dataset(dataset, target, "copy", step_bytes=10_000)


def places(volume: str) -> tuple[Any, ...]:
    with dlfs.open(volume) as target, target["x"] as dataset:
        directory = dataset.session.directory
        found = directory.names(), directory.addresses().tolist(), directory.crcs().tolist()
        assert len(read_dataset(target, "x")) == len(dataset)  # which verifies all samples
        return found


def seal(volume: str, folder: Path) -> None:
    with dlfs.open(volume) as target:
        sealed = "x" in target
    if not sealed:
        import_folder(volume, folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_import_is_killed_while_others_write(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    files = {f"{i % 9}/{i:03}": draw.randbytes(draw.randrange(9000)) for i in range(400)}
    write_files(tmp_path / "folder", files)
    layout = {"size_bytes": 24 * MIB, "chunk_bytes": 16 * KIB}
    whole, volume = (str(new_volume(tmp_path / name, **layout)) for name in ("whole", "volume"))
    begun = time.monotonic()
    import_folder(whole, tmp_path / "folder")
    duration_s = time.monotonic() - begun
    with dlfs.open(volume) as target:
        write_dataset(target, "base", {f"{i}": bytes([i]) * 5000 for i in range(10)})
    stop = FORK.Event()
    others = [FORK.Process(target=repeat, args=(volume, change, stop)) for change in (save, copy)]
    for other in others:
        other.start()
    kept = [0]
    try:
        for _ in range(KILLS):
            child = FORK.Process(target=import_folder, args=(volume, tmp_path / "folder"))
            child.start()
            child.join(draw.uniform(0, 2 * duration_s))  # the moment is random
            child.kill()
            child.join()
            assert child.exitcode in (0, -signal.SIGKILL)
            with dlfs.open(volume) as target:
                is_sealed = "x" in target
                kept += [one.sample_count for one in target.unfinished() if one.name == "x"]
            assert kept == sorted(kept)
            if is_sealed:
                assert places(volume) == places(whole)
                when_unlocked(lambda: remove(volume, "x"), 60)
                kept = [0]
        seal(volume, tmp_path / "folder")
    finally:
        stop.set()
        for other in others:
            other.join()
    assert [other.exitcode for other in others] == [0, 0]
    assert places(volume) == places(whole)
    with dlfs.open(volume) as target:
        assert list(target.verify()) == []
        for weights in read_dataset(target, "checkpoint").values():
            assert weights == weights[:1] * 18_000
        copies = {info.name for info in target.datasets()} - {"x", "base", "checkpoint"}
        assert copies <= {"copy"}
        for name in copies:
            assert read_dataset(target, name) == read_dataset(target, "base")
    for name in {"base", "checkpoint", *copies}:
        remove(volume, name)
    with dlfs.open(volume) as target, dlfs.open(whole) as other_volume:
        assert target.unfinished() == []
        assert target.usage().free_bytes == other_volume.usage().free_bytes


def remove(volume: str, name: str) -> None:
    with dlfs.open(volume) as target:
        target.prune(name, keep=1)
        target.remove(name)
