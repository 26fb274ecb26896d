"""Volumes through libdlfs's C interface (``dlfs/api.h``), by ctypes; nothing of the package reads.

``read_volume([path, ...])`` gives what ``decoder.read_volume`` gives, with every sample read three
ways: by an epoch's batches, by its path, and by its index.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

from dlfs._native import abi
from dlfs._native.library import library

MESSAGE_BYTES = 1024
PATH_BYTES = 4096
BATCH = 37


class DatasetInfo(Structure):
    """``dlfs_dataset_info``."""

    _fields_ = (
        ("name", c_char * 256),
        ("version", c_uint32),
        ("uuid", c_uint8 * 16),
        ("sample_count", c_uint64),
        ("sample_bytes", c_uint64),
    )


class OpenOptions(Structure):
    """``dlfs_open_options``."""

    _fields_ = (
        ("memory_bytes", c_uint64),
        ("version", c_uint32),
        ("depth", c_uint32),
        ("timeout_ms", c_uint32),
        ("reserved", c_uint32),
    )


class Epoch(Structure):
    """``dlfs_epoch``."""

    _fields_ = (
        ("seed", c_uint64),
        ("epoch", c_uint64),
        ("position", c_uint64),
        ("order", c_uint32),
        ("window_chunks", c_uint32),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("plan", c_uint32),
        ("reserved", c_uint32),
    )


STRUCTURES = {
    "dlfs_dataset_info": DatasetInfo,
    "dlfs_open_options": OpenOptions,
    "dlfs_epoch": Epoch,
}

PROTOTYPES = {
    "dlfs_mount": (c_int, [POINTER(c_char_p), c_uint32, c_char_p, c_uint32, POINTER(c_void_p)]),
    "dlfs_mount_devices": (
        c_int,
        [POINTER(c_void_p), c_uint32, c_char_p, c_uint32, POINTER(c_void_p)],
    ),
    "dlfs_unmount": (c_int, [c_void_p]),
    "dlfs_dataset_count": (c_uint32, [c_void_p]),
    "dlfs_dataset_describe": (c_int, [c_void_p, c_uint32, POINTER(DatasetInfo)]),
    "dlfs_open": (
        c_int,
        [c_void_p, c_char_p, POINTER(OpenOptions), c_char_p, c_uint32, POINTER(c_void_p)],
    ),
    "dlfs_close": (c_int, [c_void_p]),
    "dlfs_count": (c_uint64, [c_void_p]),
    "dlfs_find": (c_int64, [c_void_p, c_char_p]),
    "dlfs_path": (c_int64, [c_void_p, c_uint64, c_char_p, c_uint64]),
    "dlfs_length": (c_int64, [c_void_p, c_uint64]),
    "dlfs_read": (c_int64, [c_void_p, c_uint64, c_void_p, c_uint64]),
    "dlfs_read_sample": (
        c_int64,
        [c_void_p, c_uint64, c_void_p, c_uint64, POINTER(abi.Failure)],
    ),
    "dlfs_describe_failure": (c_int, [c_void_p, POINTER(abi.Failure), c_char_p, c_uint32]),
    "dlfs_dataset_reader": (c_void_p, [c_void_p]),
    "dlfs_dataset_directory": (c_void_p, [c_void_p]),
    "dlfs_begin": (c_int, [c_void_p, POINTER(Epoch)]),
    "dlfs_end": (None, [c_void_p]),
    "dlfs_order": (c_int, [c_void_p, c_uint64, c_uint64, POINTER(c_uint64)]),
    "dlfs_bread": (c_int, [c_void_p, c_uint64, POINTER(POINTER(abi.Batch))]),
}


class Failed(Exception):
    """A function returned an error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def interface() -> ctypes.CDLL:
    """libdlfs with the prototypes of ``api.h``."""
    found = ctypes.CDLL(library()._name)
    for name, (restype, argtypes) in PROTOTYPES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = restype, argtypes
    return found


def check(code: int, message: bytes = b"") -> int:
    if code < 0:
        raise Failed(code, message.decode())
    return code


@contextmanager
def mounted(uris: Sequence[str]) -> Iterator[tuple[ctypes.CDLL, c_void_p]]:
    """The interface, and a volume mounted by it from the device URIs of its members."""
    c = interface()
    message, volume = ctypes.create_string_buffer(MESSAGE_BYTES), c_void_p()
    members = (c_char_p * max(1, len(uris)))(*(uri.encode() for uri in uris))
    code = c.dlfs_mount(members, len(uris), message, MESSAGE_BYTES, byref(volume))
    check(code, message.value)
    try:
        yield c, volume
    finally:
        check(c.dlfs_unmount(volume))


@contextmanager
def opened(
    c: ctypes.CDLL, volume: c_void_p, name: bytes, version: int = 0, **options: int
) -> Iterator[c_void_p]:
    """A dataset of a mounted volume."""
    message, dataset = ctypes.create_string_buffer(MESSAGE_BYTES), c_void_p()
    chosen = OpenOptions(version=version, **options)
    code = c.dlfs_open(volume, name, byref(chosen), message, MESSAGE_BYTES, byref(dataset))
    check(code, message.value)
    try:
        yield dataset
    finally:
        check(c.dlfs_close(dataset))


def path(c: ctypes.CDLL, dataset: c_void_p, index: int) -> bytes:
    text = ctypes.create_string_buffer(PATH_BYTES)
    length = check(c.dlfs_path(dataset, index, text, PATH_BYTES))
    assert len(text.value) == length
    return text.value


def read(c: ctypes.CDLL, dataset: c_void_p, index: int) -> bytes:
    length = check(c.dlfs_length(dataset, index))
    buffer = ctypes.create_string_buffer(length + 1)
    assert check(c.dlfs_read(dataset, index, buffer, length)) == length
    return buffer.raw[:length]


def batches(c: ctypes.CDLL, dataset: c_void_p, count: int) -> Iterator[list[tuple[int, bytes]]]:
    """(index, bytes) of the epoch under way, in batches."""
    batch = POINTER(abi.Batch)()
    while (code := c.dlfs_bread(dataset, count, byref(batch))) != abi.E_END:
        check(code)
        found = batch.contents
        if found.failure_count:
            failure = abi.Failure.from_buffer_copy(found.failures[0])
            library().dlfs_batch_release(batch)
            raise Failed(failure.code, describe(c, dataset, failure))
        offsets = ctypes.cast(found.offsets, POINTER(c_int64))
        lengths = ctypes.cast(found.lengths, POINTER(c_int64))
        indices = ctypes.cast(found.indices, POINTER(c_uint64))
        yield [
            (indices[i], ctypes.string_at((found.base or 0) + offsets[i], lengths[i]))
            for i in range(found.count)
        ]
        library().dlfs_batch_release(batch)


def describe(c: ctypes.CDLL, dataset: c_void_p, failure: abi.Failure) -> str:
    """A failure of a sample in words."""
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    check(c.dlfs_describe_failure(dataset, byref(failure), message, MESSAGE_BYTES))
    return message.value.decode("ascii")


def order(c: ctypes.CDLL, dataset: c_void_p) -> list[int]:
    """The global order of the epoch under way."""
    count = c.dlfs_count(dataset)
    out = (c_uint64 * max(1, count))()
    check(c.dlfs_order(dataset, 0, count, out))
    return list(out[:count])


def epoch(c: ctypes.CDLL, dataset: c_void_p, **chosen: int) -> None:
    """Begin an epoch: the fields of ``dlfs_epoch``."""
    check(c.dlfs_begin(dataset, byref(Epoch(**chosen))))


def read_dataset(c: ctypes.CDLL, dataset: c_void_p) -> dict[bytes, bytes]:
    epoch(c, dataset, seed=3, order=abi.ORDER_GLOBAL)
    got = [pair for batch in batches(c, dataset, BATCH) for pair in batch]
    assert [index for index, _ in got] == order(c, dataset)
    samples = {}
    for index, data in sorted(got):
        name = path(c, dataset, index)
        assert c.dlfs_find(dataset, name) == index
        assert read(c, dataset, index) == data
        samples[name] = data
    assert len(samples) == c.dlfs_count(dataset)
    return samples


def read_volume(paths: Sequence[str]) -> dict[tuple[bytes, int], dict[bytes, bytes]]:
    """Every sample of every dataset of the volume that these files hold, in any order."""
    found = {}
    with mounted(paths) as (c, volume):
        for number in range(c.dlfs_dataset_count(volume)):
            info = DatasetInfo()
            check(c.dlfs_dataset_describe(volume, number, byref(info)))
            with opened(c, volume, info.name, info.version) as dataset:
                samples = read_dataset(c, dataset)
            assert len(samples) == info.sample_count
            assert sum(map(len, samples.values())) == info.sample_bytes
            found[info.name, info.version] = samples
        assert c.dlfs_dataset_describe(volume, len(found), byref(DatasetInfo())) == -errno.EINVAL
    return found
