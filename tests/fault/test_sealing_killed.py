"""A server that is killed at random moments of a seal: the dataset is whole, and in one place.

The seed is printed; ``DLFS_SEAL_KILLS`` is the number of kills (20 by default).
"""

from __future__ import annotations

import os
import random
import time
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.staging.area import StagingArea
from dlfs.staging.sealer import Seal, Sealer
from tests.support.files import write_files

KILLS = int(os.environ.get("DLFS_SEAL_KILLS", "20"))


def seal(volume: str, area_path: Path, name: str, caller: Connection) -> None:
    """Seal as the server of a mount does, when the caller says so."""
    with dlfs.open(volume) as opened, StagingArea(area_path, opened.uuid) as area:
        sealer = Sealer(opened, area)
        sealer.settle()
        caller.send("ready")
        caller.recv()
        sealer.seal(Seal(name.encode(), None))
        area.delete_removed()
        caller.send("removed")


def write(folder: Path, draw: random.Random) -> dict[str, bytes]:
    """Write a directory with small and large files and one without files."""
    files = {f"{i % 5}/{i:03}": draw.randbytes(draw.randrange(9000)) for i in range(150)}
    files["large"] = draw.randbytes(3 * MIB)
    write_files(folder, files)
    (folder / "without/files").mkdir(parents=True)
    return files


def seal_and_kill(volume: str, area: Path, name: str, after_s: float | None) -> float:
    """Seal in a process that is killed after a time, or never. Return how long it took."""
    link, other = Pipe()
    server = get_context("fork").Process(target=seal, args=(volume, area, name, other))
    server.start()
    with link, other:
        assert link.recv() == "ready"
        begin = time.monotonic()
        link.send("go")
        if after_s is None:
            assert link.recv() == "removed"
        else:
            time.sleep(after_s)  # the moment is random; nothing depends on it
            server.kill()
        server.join()
        return time.monotonic() - begin


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_seal_that_is_killed_at_any_moment(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    path, area_path = str(tmp_path / "volume.img"), tmp_path / "area"
    dlfs.format_volume(path, size_bytes=64 * MIB)
    area_path.mkdir()
    write(area_path / "first", draw)
    whole_s = seal_and_kill(path, area_path, "first", None)
    outcomes = {"sealed": 0, "back": 0}
    for number in range(KILLS):
        name = f"round{number}"
        files = write(area_path / name, draw)
        seal_and_kill(path, area_path, name, draw.uniform(0, 1.1 * whole_s))
        with dlfs.open(path) as volume, StagingArea(area_path, volume.uuid) as area:
            Sealer(volume, area).settle()
            area.delete_removed()
            assert (area.taken(), os.listdir(area_path / ".dlfs/removed")) == ([], [])
            versions = [info.version for info in volume.datasets() if info.name == name]
            if versions:
                assert (versions, area.names()) == ([1], [])
                with volume[name] as dataset:
                    assert {
                        os.fsdecode(each): dataset.get(each) for each in dataset.paths()
                    } == files
                    assert [*dataset.empty_directories()] == [b"without/files"]
                outcomes["sealed"] += 1
                volume.remove(name)
                continue
            outcomes["back"] += 1
            assert area.names() == [name.encode()]
            found = {
                str(each.relative_to(area_path / name)): each.read_bytes()
                for each in (area_path / name).rglob("*")
                if each.is_file()
            }
            assert found == files
            assert (area_path / name / "without/files").is_dir()
        seal_and_kill(path, area_path, name, None)  # it can still be sealed
        with dlfs.open(path) as volume:
            volume.remove(name)
    print(outcomes)
