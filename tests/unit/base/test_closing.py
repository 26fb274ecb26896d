"""A dataset is closed while other threads use it: its devices are closed after their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.closing import Uses
from dlfs.base.units import KIB, MIB
from dlfs.connection.connection import LocalConnection
from dlfs.dataset import dataset as datasets
from dlfs.errors import ClosedError
from tests.support.files import flip_bit

WAIT_S = 100


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path) as volume:
        with volume.writer("d", fields={"label": "<i8[]", "text": "text"}) as writer:
            for number in range(9):
                writer.add(f"{number}", {"label": number, "text": "t" * number})
        yield volume


class Pause:
    """A function that waits with a queue pair open, then calls the real one.

    Args:
        real: the real function, whose first argument is a list of devices, or has ``sources``.
    """

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, first: Any, *arguments: Any, **options: Any) -> Any:
        sources = getattr(first, "sources", first)
        with sources[0].queue_pair(1):
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        return self._real(first, *arguments, **options)


def damaged(dataset: dlfs.Dataset) -> dlfs.Batch:
    """Read a sample that is damaged: the reader looks for the reason in the new generation."""
    place = dataset.stat(3)
    with dlfs.open(place.member) as volume, volume.writer("other") as writer:
        writer.add("x", b"")
    flip_bit(place.member, place.offset_bytes)
    return dataset.read([3], on_error="skip")


@pytest.mark.parametrize(
    ("function", "use"),
    [
        ("dlfs.attributes.loading.read_into", lambda dataset: dataset.fields),
        ("dlfs.attributes.loading.read_into", lambda dataset: dataset.read([4], fields=["label"])),
        ("dlfs.connection.segment_loading.read_into", lambda dataset: dataset.get("4")),
        ("dlfs.connection.placement.newest_generation", damaged),
    ],
)
def test_devices_are_closed_after_the_last_call(
    volume: dlfs.Volume,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    use: Callable[[dlfs.Dataset], Any],
) -> None:
    dataset = volume["d"]
    device: Any = dataset.session.sources[0]
    module, _, name = function.rpartition(".")
    pause = Pause(getattr(import_module(module), name))
    monkeypatch.setattr(function, pause)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(use, dataset)
        assert pause.reached.wait(WAIT_S)
        try:
            dataset.close()
            assert device.native is not None
        finally:
            pause.go_on.set()
        with pytest.raises(ClosedError, match="it is closed"):
            found.result(WAIT_S)
    with pytest.raises(ClosedError):
        _ = device.native


def test_a_session_that_is_opened_meanwhile_is_closed(
    volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = volume["d"]
    again = datasets.Dataset(volume.session.connection, dataset._identity)
    opened = []

    def open_dataset(self: LocalConnection, *arguments: Any) -> Any:
        opened.append(real(self, *arguments))
        again.close()
        return opened[0]

    real = LocalConnection.open_dataset
    monkeypatch.setattr(LocalConnection, "open_dataset", open_dataset)
    with pytest.raises(ClosedError, match="dataset 'd': it is closed"):
        again.open()
    with pytest.raises(ClosedError):
        _ = opened[0].sources[0].native
    with pytest.raises(ClosedError, match="dataset 'd': it is closed"):
        len(again)  # the session was not left to later calls
    dataset.close()


def test_a_resource_is_freed_after_its_last_use() -> None:
    freed: list[int] = []
    uses = Uses("use it: it is closed")
    with uses:
        with uses:
            uses.close(lambda: freed.append(1))
            with pytest.raises(ClosedError, match="use it"), uses:
                raise AssertionError
        assert freed == []
    assert freed == [1]
    uses.close(lambda: freed.append(2))
    assert freed == [1, 2]
