"""Any single flipped bit is detected before its bytes are returned, or is provably harmless.

Metadata: one bit of each byte of every superblock copy and of a directory segment (byte i has bit
i mod 8 flipped), and every bit of one superblock, of the catalog and of a directory header. Data:
random bits.
"""

import os
import random
import uuid
from dataclasses import astuple

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice
from dlfs.connection.segment_loading import load_segment
from dlfs.directory import DirectoryIdentity, DirectorySizes, load_directory
from dlfs.format.geometry import DataSpace, superblock_offsets
from dlfs.store.chunk_reader import read_blocks
from dlfs.store.members import close_devices, open_devices
from dlfs.store.transaction import load_generation
from tests.support.volumes import write_dataset

MEMBER_BYTES = 1 * MIB + 160 * KIB
BLOCK_BYTES = 512
SEED = 20190923
DATA_FLIPS = int(os.environ.get("DLFS_FLIPS", "150"))

SAMPLES = {
    f"dir{i % 2}/sample-{i}".encode(): random.Random(i).randbytes(size)
    for i, size in enumerate([0, 1, 100, 511, 512, 3000, 4096, 9000, 300, 40])
}


class Media:
    """A volume in memory with one dataset, whose bits can be flipped and restored."""

    def __init__(self):
        self.name = f"flip-{uuid.uuid4().hex}"
        self.uri = f"mem:{self.name}?size={MEMBER_BYTES}"
        dlfs.format_volume(self.uri, chunk_bytes=4 * KIB, block_bytes=BLOCK_BYTES)
        with dlfs.open(self.uri) as volume:
            for version in range(2):  # so that both superblock slots are in use
                write_dataset(volume, "the data", SAMPLES)
                if not version:
                    volume.remove("the data")
        self.devices = open_devices([self.uri], writable=True)
        self.generation = load_generation(self.devices)
        (self.record,) = self.generation.catalog.datasets

    def flip(self, byte, bit):
        device = self.devices[0]
        start = byte - byte % BLOCK_BYTES
        content = bytearray(device.read(start, BLOCK_BYTES))
        content[byte - start] ^= 1 << bit
        device.write(start, bytes(content))

    def bytes_of(self, runs, length_bytes):
        """Return the offset on the member of each byte of a space."""
        space = DataSpace(self.generation.geometry, runs)
        return [space.resolve(address)[1] for address in range(length_bytes)]

    def directory_bytes(self):
        record = self.record
        return self.bytes_of(record.directory_runs, record.entries_bytes + record.names_bytes)

    def catalog_bytes(self):
        superblock = self.generation.superblock
        return self.bytes_of(superblock.catalog_runs, superblock.catalog_bytes)

    def used_bytes(self):
        """Map each byte of the member that belongs to a sample to the sample's index."""
        with dlfs.open(self.uri) as volume, volume["the data"] as dataset:
            space = DataSpace(self.generation.geometry, self.record.data_runs)
            return {
                space.resolve(address + i)[1]: index
                for index, address in enumerate(dataset.directory.addresses().tolist())
                for i in range(int(dataset.lengths([index])[0]))
            }

    def close(self):
        close_devices(self.devices)
        MemoryDevice.forget(self.name)


@pytest.fixture(scope="module")
def media():
    made = Media()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def whole(media):
    """Check after each test that it restored the bits that it flipped."""
    yield
    with dlfs.open(media.uri) as volume:
        assert list(volume.verify()) == []


def each_byte(places):
    """Return one (byte, bit) for each byte; the bit differs from byte to byte."""
    return [(byte, number % 8) for number, byte in enumerate(places)]


def each_bit(places):
    return [(byte, bit) for byte in places for bit in range(8)]


@pytest.mark.parametrize("copies", [(0,), (1, 2)], ids=["A", "B-and-tail"])
def test_superblocks(media, copies):
    """Flip bits of one copy, or of two at once: the third is enough."""
    starts = [superblock_offsets(MEMBER_BYTES)[copy] for copy in copies]
    described = [*range(272), *range(512, 528), *range(4092, 4096)]
    every_bit = each_bit(described) if copies == (0,) else []  # the same code checks all copies
    for place, bit in [*every_bit, *each_byte(range(4096))]:
        for start in starts:
            media.flip(start + place, bit)
        found = load_generation(media.devices)
        for start in starts:
            media.flip(start + place, bit)
        assert found.catalog == media.generation.catalog
        assert found.superblock == media.generation.superblock
        damaged = [c for c in found.members[0].copies if c.superblock is None]
        assert [c.offset_bytes for c in damaged] == starts, (place, bit)
        for start, copy in zip(starts, damaged, strict=True):
            assert media.uri in str(copy.error)
            assert f"byte {start}" in str(copy.error)


def test_catalog(media):
    places = media.catalog_bytes()
    for byte, bit in each_bit(places):
        media.flip(byte, bit)
        with pytest.raises(dlfs.ChecksumError) as caught:
            load_generation(media.devices)
        media.flip(byte, bit)
        assert media.uri in str(caught.value)
        assert f"byte {places[0]}" in str(caught.value)


def check_directory(media, flips):
    start = media.directory_bytes()[0]
    for byte, bit in flips:
        media.flip(byte, bit)
        with pytest.raises(dlfs.FormatError) as caught:
            load_segment(media.generation, media.record, shared=False).names()
        media.flip(byte, bit)
        for part in ("'the data'", media.uri, f"byte {start}"):
            assert part in str(caught.value), (byte, bit)


def test_every_bit_of_a_directory_header(media):
    header = media.directory_bytes()[:4096]
    check_directory(media, each_bit([*header[:172], *header[4092:]]))


def test_every_byte_of_a_directory(media):
    """Check every byte, which is fast enough in memory."""
    record = media.record
    space = DataSpace(media.generation.geometry, record.directory_runs)
    sizes = DirectorySizes(record.entries_bytes, record.names_bytes)
    identity = DirectoryIdentity(media.generation.superblock.volume_uuid, record.uuid, "flipped")
    segment = np.array(read_blocks(media.devices, space, 0, sum(astuple(sizes))))

    def load(address, memory):
        memory[:] = segment[address : address + len(memory)].data

    load_directory(identity, sizes, load, root=None).names()
    for byte, bit in each_byte(range(len(segment))):
        segment[byte] ^= 1 << bit
        with pytest.raises(dlfs.FormatError):
            load_directory(identity, sizes, load, root=None).names()
        segment[byte] ^= 1 << bit


def check_samples(media):
    """Check the samples that can be read; return the errors of the others, by path."""
    errors = {}
    with dlfs.open(media.uri) as volume, volume["the data"] as dataset:
        assert dataset.paths() == sorted(SAMPLES)
        for path, data in SAMPLES.items():
            try:
                assert dataset.get(path) == data
            except dlfs.ChecksumError as error:
                errors[path] = error
    return errors


def test_data(media):
    chance = random.Random(SEED)
    owners = media.used_bytes()
    chunks = media.bytes_of(media.record.data_runs, media.record.data_bytes)
    paths = sorted(SAMPLES)
    hits = 0
    for _ in range(DATA_FLIPS):
        byte, bit = chance.choice(chunks), chance.randrange(8)
        media.flip(byte, bit)
        try:
            errors = check_samples(media)
            with dlfs.open(media.uri) as volume:
                findings = list(volume.verify())
        finally:
            media.flip(byte, bit)
        expected = [paths[owners[byte]]] if byte in owners else []
        assert list(errors) == expected, (byte, bit)
        assert [finding.path for finding in findings] == expected, (byte, bit)
        for path, error in errors.items():
            for part in ("'the data'", repr(path.decode()), media.uri, "CRC32C"):
                assert part in str(error)
        hits += len(errors)
    assert 0 < hits < DATA_FLIPS


def test_flips_of_unused_bytes_are_harmless(media):
    """Flip bits of padding, free chunks, the lock record and the gaps."""
    chance = random.Random(SEED)
    used = set(media.used_bytes()) | set(media.catalog_bytes()) | set(media.directory_bytes())
    for start in superblock_offsets(MEMBER_BYTES):
        used.update(range(start, start + 4096))
    for _ in range(DATA_FLIPS):
        byte, bit = chance.randrange(MEMBER_BYTES), chance.randrange(8)
        if byte in used:
            continue
        media.flip(byte, bit)
        try:
            assert check_samples(media) == {}, (byte, bit)
            with dlfs.open(media.uri) as volume:
                assert list(volume.verify()) == []
        finally:
            media.flip(byte, bit)
