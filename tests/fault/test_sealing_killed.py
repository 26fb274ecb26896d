"""A server that is killed at random moments of a seal: the dataset is whole, and in one place.

The seed is printed; ``DLFS_SEAL_KILLS`` is the number of kills (20 by default).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import dlfs
from dlfs.base.units import MIB
from dlfs.staging.area import StagingArea
from dlfs.staging.sealer import Sealer

KILLS = int(os.environ.get("DLFS_SEAL_KILLS", "20"))

SERVER = """
import os, sys
import dlfs
from dlfs.staging.area import StagingArea
from dlfs.staging.sealer import Seal, Sealer

volume = dlfs.open(sys.argv[1])
with StagingArea(sys.argv[2], volume.uuid) as area:
    sealer = Sealer(volume, area)
    sealer.settle()
    print("ready", flush=True)
    sys.stdin.readline()
    sealer.seal(Seal(sys.argv[3].encode()))
    print("sealed", flush=True)
    area.delete_removed()
    print("removed", flush=True)
"""


def write(folder: Path, draw: random.Random) -> dict[str, bytes]:
    """Write a directory with small and large files and one without files."""
    files = {f"{i % 5}/{i:03}": draw.randbytes(draw.randrange(9000)) for i in range(150)}
    files["large"] = draw.randbytes(3 * MIB)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "without/files").mkdir(parents=True)
    return files


def seal_and_kill(volume: str, area: Path, name: str, after_s: float | None) -> float:
    """Seal in a process that is killed after a time, or never. Return how long it took."""
    command = [sys.executable, "-c", SERVER, volume, str(area), name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        begin = time.monotonic()
        server.stdin.write("go\n")
        server.stdin.flush()
        if after_s is None:
            assert [server.stdout.readline() for _ in range(2)] == ["sealed\n", "removed\n"]
        else:
            time.sleep(after_s)  # the moment is random; nothing depends on it
            server.send_signal(signal.SIGKILL)
        return time.monotonic() - begin


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
