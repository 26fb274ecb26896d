"""A crash at a write of growing, rebalancing or shrinking loses nothing, and each can be repeated.

Power cuts are simulated, as in test_crash.py: the media is rebuilt from a record of every write and
flush, with unflushed writes lost, torn and reordered. Some of the writes are tried;
``DLFS_CRASH_AT_EACH_WRITE=1`` tries all.
"""

import contextlib
import os
import random
import uuid

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice, open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.errors import FormatError, UsageError
from dlfs.store.members import split_uris
from dlfs.volume.volume import Volume
from tests.support.devices import RecordingDevice, WriteLog
from tests.support.volumes import read_datasets, write_dataset

MEMBER_BYTES = 1 * MIB + 256 * KIB
SEED = 20261123
SAMPLES = {f"a/{i}".encode(): bytes([i + 1]) * (700 + 5000 * i) for i in range(4)}
MORE = {b"b": random.Random(1).randbytes(9000), b"c/d": random.Random(2).randbytes(5000)}


class Media:
    """Devices in memory: a volume on the first half, and as many devices to grow it by."""

    def __init__(self, replicas, stride):
        self.replicas = replicas
        self.stride = 1 if os.environ.get("DLFS_CRASH_AT_EACH_WRITE") else stride
        names = [f"resize-{uuid.uuid4().hex}" for _ in range(2 * replicas)]
        self.names = names
        self.uris = [f"mem:{name}?size={MEMBER_BYTES}" for name in names]
        self.old, self.new = self.uris[:replicas], self.uris[replicas:]
        dlfs.format_volume(self.old, chunk_bytes=4 * KIB, block_bytes=512, replicas=replicas)
        with dlfs.open(self.old) as volume:
            write_dataset(volume, "first", SAMPLES)
            write_dataset(volume, "first", MORE, append=True)
        self.log = WriteLog()

    def run(self, uris, change):
        """Run a change and record its writes, of the devices in the order of their URIs."""

        def opener(uri, *, writable):
            device = open_device(uri, writable=writable)
            return RecordingDevice(device, self.log) if writable else device

        with Volume(LocalConnection(split_uris(uris), OpenOptions(opener=opener))) as volume:
            change(volume)

    def states(self):
        """Yield the images of the media after a crash at events, in one of three ways."""
        for count in range(0, len(self.log.events) + 1, self.stride):
            chance = random.Random(SEED + count)
            way = count // self.stride % 3
            if way == 0:
                yield self.log.images(count)
            elif way == 1:
                yield self.log.torn_images(count, chance)
            else:
                yield self.log.reordered_images(count, chance)
        yield self.log.images(len(self.log.events))

    def restore(self, images):
        for uri, image in zip(self.uris, images, strict=True):
            with open_device(uri, writable=True) as device:
                device.write(0, image)


@pytest.fixture(
    params=[
        pytest.param((1, 5), id="plain"),
        pytest.param((2, 11), id="replicas"),
    ]
)
def media(request):
    made = Media(*request.param)
    yield made
    for name in made.names:
        MemoryDevice.forget(name)


def contents(uris):
    with dlfs.open(uris) as volume:
        assert [f for f in volume.verify() if f.kind != "superblock"] == []
        return read_datasets(volume)


def test_a_crash_while_a_volume_is_grown(media):
    expected = contents(media.old)
    media.run(media.old, lambda volume: volume.grow(media.new))
    grown = 0
    for images in media.states():
        media.restore(images)
        with dlfs.open(media.old) as volume:  # finds new members by the record of their URIs
            before = len(volume.members)
            assert before in (len(media.old), len(media.uris))
            assert read_datasets(volume) == expected
            with (
                contextlib.suppress(UsageError)
                if before > len(media.old)
                else (contextlib.nullcontext())
            ):
                volume.grow(media.new)
            assert len(volume.members) == len(media.uris)
            assert read_datasets(volume) == expected
            assert [f for f in volume.verify() if f.kind != "superblock"] == []
        grown += before == len(media.uris)
    assert grown > 0


def test_a_crash_while_a_volume_is_rebalanced(media, monkeypatch):
    monkeypatch.setattr("dlfs.store.moving.STEP_BYTES", 12 * KIB)  # several steps
    with dlfs.open(media.old) as volume:
        volume.grow(media.new)
    expected = contents(media.uris)
    media.run(media.uris, lambda volume: volume.rebalance())
    moved = set()
    for images in media.states():
        media.restore(images)
        with dlfs.open(media.uris) as volume:
            assert read_datasets(volume) == expected
            moved.add(volume.rebalance().moved_bytes)
            assert read_datasets(volume) == expected
            assert [f for f in volume.verify() if f.kind != "superblock"] == []
            assert volume.rebalance().moved_bytes == 0
    assert len(moved) > 2, "some crashes leave a part of the work"


def test_a_crash_while_a_volume_is_shrunk(media):
    with dlfs.open(media.old) as volume:
        volume.grow(media.new)
    expected = contents(media.uris)
    media.run(media.uris, lambda volume: volume.shrink(range(media.replicas)))
    assert contents(media.new) == expected
    finished = 0
    for images in media.states():
        media.restore(images)
        try:
            volume = dlfs.open(media.uris)
        except FormatError:  # the superblocks of the removed members are erased
            volume = dlfs.open(media.new)
        with volume:
            assert read_datasets(volume) == expected
            assert [f for f in volume.verify() if f.kind != "superblock"] == []
            if len(volume.members) > len(media.new):
                volume.shrink([media.old[0]])
            else:
                finished += 1
            assert volume.uri == ",".join(media.new)
            assert read_datasets(volume) == expected
    assert finished > 0
