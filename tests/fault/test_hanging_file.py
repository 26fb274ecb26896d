"""A disk of this machine that hangs, played by a file whose file system answers no read.

The kernel ends no read of it, so that memory and descriptors stay until it answers. Calls end all
the same, also opening and closing, and with another copy they succeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base import deadlines
from dlfs.base.units import KIB, MIB
from dlfs.errors import DeviceTimeoutError
from tests.fault.silent_world import BOUND_S, COUNT, ORDERED, SAMPLES, wait_until, within
from tests.support.hanging_file import HangingFile, hanging_file

pytestmark = pytest.mark.fuse


@pytest.fixture(autouse=True)
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CALL_TIMEOUT_MS", int(BOUND_S * 1000))


@pytest.fixture(params=[1, 2])
def copies(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def file(tmp_path: Path, copies: int) -> Iterator[HangingFile]:
    """The first member of a volume of so many copies; another one is ``tmp_path / "1.img"``."""
    members = [tmp_path / f"{number}.img" for number in range(copies)]
    uris = [str(path) for path in members]
    dlfs.format_volume(uris, size_bytes=8 * MIB, chunk_bytes=16 * KIB, replicas=copies)
    with dlfs.open(uris) as volume, volume.writer("ds") as writer:
        for path, data in SAMPLES.items():
            writer.add(path, data, attributes={"length": len(data)})
    with hanging_file(members[0], tmp_path / "mnt") as file:
        yield file


def test_calls_end(file: HangingFile, copies: int, tmp_path: Path) -> None:
    uris = [str(file.path), str(tmp_path / "1.img")][:copies]

    def check(call: Any, expected: Any) -> None:
        result, failure = within(BOUND_S, call)
        if copies > 1:
            assert (result, failure) == (expected, None)
        else:
            assert isinstance(failure, DeviceTimeoutError), failure
            assert str(file.path) in str(failure)

    volume = dlfs.open(uris)
    dataset = volume["ds"]
    file.hang()
    check(lambda: dataset[40], ORDERED[40])
    check(lambda: dataset.read([3, 50]).to_list(), [ORDERED[3], ORDERED[50]])
    epoch = dataset.batches(8, seed=3)
    check(lambda: len(next(epoch)), 8)
    check(dataset.paths, sorted(SAMPLES))
    check(lambda: int(dataset.column("length")[5]), 9000)
    check(lambda: len(volume["ds"].open()), COUNT)
    check(lambda: dlfs.open(uris).info().dataset_count, 1)
    for close in (epoch.close, dataset.close, volume.close):
        assert within(BOUND_S, close) == (None, None)
    file.go_on()

    def reads() -> bool:
        try:
            with dlfs.open(uris) as again, again["ds"] as dataset:
                return dataset.read(range(COUNT)).to_list() == ORDERED
        except DeviceTimeoutError:
            return False

    wait_until(reads)
