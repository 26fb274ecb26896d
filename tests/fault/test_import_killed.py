"""An import in steps that is killed at random moments, while others write to its volume.

The seed is printed; ``DLFS_IMPORT_KILLS`` is the number of kills (10 by default).
"""

from __future__ import annotations

import os
import random
import signal
import time
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


def save(volume: str, number: int, stop: Any) -> None:
    """Save checkpoints, keep the last two, and copy one, as long as the test runs."""
    step = 0
    while not stop.is_set():
        data = {"weights": bytes([number, step % 256]) * 9000}

        def change(data: dict[str, bytes] = data) -> None:
            with dlfs.open(volume) as target:
                write_dataset(target, f"checkpoint-{number}", data)
                target.prune(f"checkpoint-{number}", keep=2)

        when_unlocked(change, 60)
        step += 1
        stop.wait(0.01)


def places(volume: str) -> tuple[Any, ...]:
    with dlfs.open(volume) as target, target["x"] as dataset:
        directory = dataset.session.directory
        found = directory.names(), directory.addresses().tolist(), directory.crcs().tolist()
        assert list(target.verify()) == []
        return found


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
    stop = FORK.Event()
    others = [FORK.Process(target=save, args=(volume, number, stop)) for number in range(2)]
    for other in others:
        other.start()
    kept = []
    try:
        for _ in range(KILLS):
            child = FORK.Process(target=import_folder, args=(volume, tmp_path / "folder"))
            child.start()
            child.join(draw.uniform(0, duration_s))  # the moment is random
            child.kill()
            child.join()
            with dlfs.open(volume) as target:
                kept += [info.sample_count for info in target.unfinished()]
            if child.exitcode == 0:
                break
            assert child.exitcode == -signal.SIGKILL
        if child.exitcode:
            with dlfs.open(volume) as target:
                sealed = "x" in target
            if not sealed:
                import_folder(volume, tmp_path / "folder")
    finally:
        stop.set()
        for other in others:
            other.join()
    assert [other.exitcode for other in others] == [0, 0]
    assert kept == sorted(kept)
    assert places(volume) == places(whole)
    with dlfs.open(volume) as target:
        assert {info.name for info in target.datasets()} == {"x", "checkpoint-0", "checkpoint-1"}
        for number in range(2):
            (weights,) = read_dataset(target, f"checkpoint-{number}").values()
            assert weights == weights[:2] * 9000
            target.remove(f"checkpoint-{number}")
        assert target.unfinished() == []
        with dlfs.open(whole) as other_volume:
            assert target.usage().free_bytes == other_volume.usage().free_bytes
