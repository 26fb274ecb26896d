"""A change that raises says so if the volume has it all the same, so that nobody makes it twice."""

from __future__ import annotations

import uuid

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice, open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.errors import DlfsError
from dlfs.store.members import split_uris
from dlfs.volume.volume import Volume
from tests.support.devices import StoppingDevice, StopPoint

MADE = "the change itself is on the volume"
OPEN = "the change may be on the volume"


class ReadableDevice(StoppingDevice):
    """A device whose writes and flushes fail after the stop, and whose reads do not."""

    def before_read(self) -> None:
        """Let the read pass."""


def write(volume: Volume) -> None:
    with volume.writer("new") as writer:
        writer.add("sample", bytes(5000))


def append(volume: Volume) -> None:
    with volume.append("old") as writer:
        writer.add("sample", bytes(5000))


CHANGES = {
    "write": (write, {"old@1", "new@1"}),
    "append": (append, {"old@1", "old@2"}),
    "remove": (lambda volume: volume.remove("old"), set()),
    "rename": (lambda volume: volume.rename("old", "other"), {"other@1"}),
}


def names(uris: list[str]) -> set[str]:
    with dlfs.open(uris) as volume:
        return {f"{info.name}@{info.version}" for info in volume.datasets()}


def check(notes: str, found: set[str], after: set[str], *, known: bool) -> bool:
    """Compare the notes of an error with the volume; return True if the change was made."""
    assert (OPEN in notes) <= (not known)
    if found == after:
        assert MADE in notes or OPEN in notes
    else:
        assert found == {"old@1"}
        assert MADE not in notes
    return found == after


@pytest.mark.parametrize("kind", [ReadableDevice, StoppingDevice])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_raises_tells_whether_it_was_made(
    name: str, kind: type[StoppingDevice]
) -> None:
    change, after = CHANGES[name]
    raised = made = 0
    for count in range(100):
        uris = [f"mem:told-{uuid.uuid4().hex}?size={MIB + 256 * KIB}" for _ in range(2)]
        dlfs.format_volume(uris, chunk_bytes=4 * KIB, block_bytes=512, replicas=2)
        with dlfs.open(uris) as volume, volume.writer("old") as writer:
            writer.add("first", bytes(3000))
        point = StopPoint(count, action="error")

        def opener(uri, *, writable, point=point):
            device = open_device(uri, writable=writable)
            return kind(device, point) if writable else device

        try:
            with Volume(LocalConnection(split_uris(uris), OpenOptions(opener=opener))) as volume:
                change(volume)
        except DlfsError as error:
            raised += 1
            notes = " ".join(getattr(error, "__notes__", ()))
            made += check(notes, names(uris), after, known=kind is ReadableDevice)
        else:
            break
        finally:
            for uri in uris:
                MemoryDevice.forget(uri[len("mem:") :].partition("?")[0])
    else:
        pytest.fail("the change never succeeded")
    assert raised > 5
    assert made >= 2  # the tail copies, and what comes after them
