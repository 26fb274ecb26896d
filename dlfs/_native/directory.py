"""The native sample directory as a Python object: opens a segment, and queries it.

Objects keep the memory that C uses alive. A directory never changes, so any threads
may query it at once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from ctypes import byref, c_uint64
from itertools import pairwise
from typing import cast
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native import abi
from dlfs._native.handle import Handle
from dlfs._native.library import check, error_for, library
from dlfs._native.paths import LOCATION_BYTES, check_packed
from dlfs.errors import ClosedError, UsageError, VersionError

MAGIC = b"DLFSDIR1"
VERSION = 1

PATH_BYTES_MAX = 4095
_WIDE_INDICES_MIN = (1 << 32) - 1
"""Fewest samples of a directory whose indices take 8 bytes."""

_NOT_FOUND = (1 << 64) - 1
_UNSORTED = (
    "expected all samples, each once, sorted by address, in one chunk or from the start of one on: "
    "reads could not be verified; import the dataset anew"
)
_USUAL_PATH_BYTES = 128  # few paths are longer
_TEXT_BYTES = 1 << 20  # names are decoded into text of this size at a time


def _check_version(entries: NDArray[np.uint8], label: str) -> None:
    """Raise VersionError if a segment is of another version."""
    version = int(entries[8:12].view("<u4")[0])
    if entries[:8].tobytes() == MAGIC and version != VERSION:
        raise VersionError(f"open {label}: expected version {VERSION}, got {version}")


class NativeDirectory:
    """A ``dlfs_directory`` over the bytes of its entries part.

    Args:
        entries: the entries part, at a multiple of 64 bytes in memory; kept alive, never written.
        label: name of the directory in errors.

    Attributes:
        label: as given.
        count: number of samples.
        data_bytes: length of the data space in bytes, as stored in the segment.
        chunk_bytes: chunk size of the volume in bytes, as stored in the segment.
        names_bytes: length of the names part in bytes.
        empty_count: number of directories without samples.

    Raises:
        FormatError: the part is malformed (ChecksumError, TruncatedError, VersionError).
        UsageError: the memory is misaligned.

    Threads: any at once.
    """

    def __init__(self, entries: NDArray[np.uint8], *, label: str) -> None:
        handle = Handle(library().dlfs_directory_close, entries)
        code = library().dlfs_directory_open(entries.ctypes.data, entries.nbytes, byref(handle))
        if code == abi.E_FORMAT:
            _check_version(entries, label)
        check(code, f"open {label}")
        self._own(handle, entries, label)

    def _own(self, handle: Handle, entries: NDArray[np.uint8], label: str) -> None:
        """Take the handle of an open directory; the first object that it keeps are the entries."""
        self.label = label
        self._entries = entries
        self._names: NDArray[np.uint8] | None = None
        self._handle: Handle | None = handle
        self.count: int = library().dlfs_directory_count(handle)
        self.data_bytes: int = library().dlfs_directory_data_bytes(handle)
        self.names_bytes: int = library().dlfs_directory_names_bytes(handle)
        self.chunk_bytes: int = library().dlfs_directory_chunk_bytes(handle)
        self.empty_count: int = library().dlfs_directory_empty_count(handle)

    def _open_parts(
        self,
        whole: NativeDirectory,
        locations: NDArray[np.uint8],
        order: NDArray[np.uint64] | None,
    ) -> None:
        """Open a directory of a part of each sample; it has the names of the whole one.

        Args:
            whole: directory of the samples.
            locations: locations of the parts, ``uint8[16 * count]``; kept alive, not copied.
            order: indices sorted by (address, index), ``uint64[count]``; None: as in ``whole``.

        Raises:
            UsageError: the arrays are not of the directory's length.
        """
        if (
            locations.nbytes != whole.count * LOCATION_BYTES
            or len(range(whole.count) if order is None else order) != whole.count
        ):
            raise UsageError(f"open {whole.label}: expected {whole.count} locations")
        dtype = np.uint32 if whole.count < _WIDE_INDICES_MIN else np.uint64
        stored = None if order is None else np.ascontiguousarray(order, dtype)
        owner = whole.handle
        handle = Handle(library().dlfs_directory_close, locations, owner, stored)
        code = library().dlfs_directory_open_parts(
            owner,
            locations.ctypes.data,
            None if stored is None else stored.ctypes.data,
            byref(handle),
        )
        check(code, f"open {whole.label}")
        self._own(handle, locations, whole.label)

    @property
    def handle(self) -> Handle:
        """The owner of the ``dlfs_directory``; objects that use the directory keep it.

        Raises:
            ClosedError: the directory is closed.
        """
        handle = self._handle
        if handle is None:
            raise ClosedError(f"use {self.label}: it is closed")
        return handle

    @property
    def dataset_uuid(self) -> UUID:
        """UUID of the dataset, as stored in the segment."""
        return UUID(bytes=self._entries[16:32].tobytes())

    def attach_names(self, names: NDArray[np.uint8]) -> None:
        """Give the directory its names part, once; it is kept alive, never written.

        Raises:
            FormatError: it is shorter than the header says (TruncatedError).
            UsageError: there is one already, or the memory is misaligned.
        """
        if self._names is not None:
            raise UsageError(f"attach names to {self.label}: it has its names")
        handle = self.handle
        handle.keeps += (names,)
        code = library().dlfs_directory_attach_names(handle, names.ctypes.data, names.nbytes)
        # A call that a fork or an exception cut off from its caller has attached the same bytes.
        if code != -errno.EALREADY:
            check(code, f"attach {names.nbytes} bytes of names to {self.label}")
        self._names = names

    def verify_memory(self, part: int, memory: NDArray[np.uint8]) -> None:
        """Check every block of a part (0 entries, 1 names) against the directory's checksums.

        The entries that the directory is open over must also list all samples in storage order,
        and each must lie in chunks as it may.

        Raises:
            ChecksumError: a block is bad; the message has its offset in the part.
            FormatError: the samples are not listed in storage order, or lie in chunks as none may;
                the message has the offset.
            TruncatedError: the memory is shorter than the part.
        """
        bad = c_uint64()
        code = library().dlfs_directory_verify(
            self.handle, part, memory.ctypes.data, memory.nbytes, byref(bad)
        )
        name = ("entries", "names")[part]
        where = f"verify the {name} of {self.label} at byte {bad.value * 4096}"
        if code == abi.E_CHECKSUM:
            raise error_for(code, where)
        if code == abi.E_FORMAT:
            raise error_for(code, where, reason=_UNSORTED)
        check(code, f"verify the {name} of {self.label} in {memory.nbytes} bytes")

    def verify_own(self) -> None:
        """Check every block of the parts in use: the entries, and the names when they are attached.

        Raises:
            ChecksumError: a block is bad; the message has its offset in the part.
            FormatError: the samples are not listed in storage order; the message has the offset.
        """
        self.verify_memory(0, self._entries)
        if self._names is not None:
            self.verify_memory(1, self._names)

    def packed_locations(self) -> NDArray[np.uint8]:
        """Return the locations in the entries part: ``uint8[16 * count]``, read-only."""
        base = library().dlfs_directory_locations(self.handle)
        return self._view(base, LOCATION_BYTES * self.count)

    @property
    def parts(self) -> NDArray[np.uint32]:
        """CRC32C of each part of a sample larger than a chunk, a read-only view.

        ``uint32[n_chunks]`` by the number of the chunk in the data space: a part is the bytes of
        the sample in one chunk, and 0 stands for a chunk without one. Empty if no sample is larger
        than a chunk.
        """
        count = c_uint64()
        base = library().dlfs_directory_parts(self.handle, byref(count))
        return self._view(base, 4 * count.value).view(np.uint32)

    def _view(self, base: int | None, size: int) -> NDArray[np.uint8]:
        """Return a read-only view of the bytes at an address in the entries part."""
        entries = cast("NDArray[np.uint8]", self.handle.keeps[0])
        first = (base or 0) - entries.ctypes.data
        view = entries[first : first + size]
        view.flags.writeable = False
        return view

    def verify_parts(self) -> int | None:
        """Return the first sample whose CRC32C is not that of its parts; None if there is none.

        Raises:
            UsageError: the directory is one of parts of samples.
        """
        bad = c_uint64()
        code = library().dlfs_directory_verify_parts(self.handle, byref(bad))
        if code == abi.E_FORMAT:
            return bad.value
        check(code, f"verify the parts of {self.label}")
        return None

    def order(self, first: int = 0, count: int | None = None) -> NDArray[np.uint64]:
        """Return the indices at ranks first..first+count-1 of storage order, ``uint64[count]``.

        By default, those of all ranks that follow.

        Raises:
            UsageError: out of range.
            FormatError: the order names a sample that does not exist.
        """
        count = self.count - first if count is None else count
        self._check_range("list the storage order", first, count)
        out = np.empty(count, np.uint64)
        code = library().dlfs_directory_order(self.handle, first, count, out.ctypes.data)
        check(code, f"list the storage order of {self.label} from rank {first}")
        return out

    def rank_at(self, address: int) -> int:
        """Return the rank of the first sample at or after an address; count if there is none."""
        rank: int = library().dlfs_directory_rank_at(self.handle, address)
        return rank

    def find_packed(
        self, text: NDArray[np.uint8], offsets: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Find packed paths, ``text[offsets[i]:offsets[i + 1]]``; the index is -1 if not found.

        Args:
            text: uint8[n_bytes].
            offsets: uint64[n_paths + 1], rising.

        Raises:
            UsageError: the arrays are not such, or names are not attached.
            FormatError: the tree or the names are malformed.
        """
        check_packed(text, offsets)
        self.load_names()
        out = np.empty(len(offsets) - 1, np.uint64)
        code = library().dlfs_directory_find(
            self.handle, text.ctypes.data, offsets.ctypes.data, len(out), out.ctypes.data
        )
        check(code, f"look {len(out)} paths up in {self.label}")
        return out.view(np.int64)

    def find_one(self, path: bytes) -> int:
        """Find the index of one path, without arrays; -1 if no sample has the path.

        Raises:
            UsageError: names are not attached.
            FormatError: the tree or the names are malformed.
        """
        self.load_names()
        offsets = (c_uint64 * 2)(0, len(path))
        out = c_uint64()
        code = library().dlfs_directory_find(self.handle, path, offsets, 1, byref(out))
        check(code, f"look a path up in {self.label}")
        return -1 if out.value == _NOT_FOUND else out.value

    def lower_bound(self, path: bytes) -> int:
        """Find the index of the first sample whose path is >= path; count if there is none.

        Raises:
            UsageError: names are not attached.
            FormatError: the names are malformed.
        """
        return self._search(library().dlfs_directory_lower_bound, path, "names")

    def empty_lower_bound(self, path: bytes) -> int:
        """Find the number of the first empty directory whose path and a slash are >= a path.

        It is ``empty_count`` if there is none.

        Raises:
            UsageError: names are not attached.
            FormatError: the names are malformed.
        """
        search = library().dlfs_directory_empty_lower_bound
        return self._search(search, path, "empty directories") if self.empty_count else 0

    def _search(self, search: Callable[..., int], path: bytes, what: str) -> int:
        """Find where a path is in one of the two lists of names."""
        self.load_names()
        number = c_uint64()
        check(
            search(self.handle, path, len(path), byref(number)),
            f"search the {what} of {self.label}",
        )
        return number.value

    def empty_names(self, first: int, count: int) -> list[bytes]:
        """Return the paths of the empty directories first..first+count-1, with a slash behind each.

        Raises:
            UsageError: out of range, or names are not attached.
            FormatError: the names are malformed.
        """
        action = f"list the empty directories of {self.label}"
        decode = library().dlfs_directory_empty_names
        return self._decode_range(decode, first, count, action) if self.empty_count else []

    def names(self, first: int = 0, count: int | None = None) -> list[bytes]:
        """Return the paths of the samples first..first+count-1; to the end by default.

        Raises:
            UsageError: out of range, or names are not attached.
            FormatError: the names are malformed.
        """
        count = self.count - first if count is None else count
        self._check_range("list names", first, count)
        action = f"list the names of {self.label} from index {first}"
        return self._decode_range(library().dlfs_directory_names, first, count, action)

    def packed_names(self, first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Return the paths of consecutive samples, packed: fewer than asked for if they are long.

        Args:
            first: index of the first sample.
            count: most samples, >= 1.

        Returns:
            The paths one after the other, ``uint8[n_bytes]``, and the offsets around each,
            ``uint64[n + 1]``, with ``1 <= n <= count``.

        Raises:
            UsageError: out of range, or names are not attached.
            FormatError: the names are malformed.
        """
        self._check_range("list names", first, count)
        self.load_names()
        text = np.empty(PATH_BYTES_MAX + _USUAL_PATH_BYTES * count, np.uint8)
        offsets = np.empty(count + 1, np.uint64)
        fitted = library().dlfs_directory_names(
            self.handle, first, count, text.ctypes.data, text.nbytes, offsets.ctypes.data
        )
        check(fitted, f"list the names of {self.label} from index {first}")
        return text[: int(offsets[fitted])], offsets[: fitted + 1]

    def _decode_range(
        self, function: Callable[..., int], first: int, count: int, action: str
    ) -> list[bytes]:
        """Return consecutive paths of one of the two lists of names."""
        self.load_names()
        return self._decode(
            count,
            lambda done, *out: function(self.handle, first + done, count - done, *out),
            action,
        )

    def names_of(self, indices: NDArray[np.uint64]) -> list[bytes]:
        """Return the paths of samples by their indices, in any order.

        Args:
            indices: ``uint64[n]``, contiguous.

        Raises:
            UsageError: an index is out of range, or names are not attached.
            FormatError: the names are malformed.
        """
        self.load_names()

        def decode(done: int, *out: int) -> int:
            left = indices[done:]
            return library().dlfs_directory_names_of(  # type: ignore[no-any-return]
                self.handle, left.ctypes.data, len(left), *out
            )

        return self._decode(len(indices), decode, f"list {len(indices)} names of {self.label}")

    def _decode(self, count: int, decode: Callable[..., int], action: str) -> list[bytes]:
        """Return paths that a function decodes, as many at a time as its text has room for.

        Args:
            count: number of paths.
            decode: called with the number of paths decoded so far, address and length of the text,
                and address of the offsets; returns how many paths it has decoded.
            action: what is done, for errors.
        """
        paths: list[bytes] = []
        text = np.empty(min(_TEXT_BYTES, count * PATH_BYTES_MAX), np.uint8)
        offsets = np.empty(count + 1, np.uint64)
        while len(paths) < count:
            fitted = decode(len(paths), text.ctypes.data, text.nbytes, offsets.ctypes.data)
            check(fitted, action)
            ends = offsets[: fitted + 1].tolist()
            decoded = text[: ends[-1]].tobytes()
            paths += [decoded[start:end] for start, end in pairwise(ends)]
        return paths

    def close(self) -> None:
        """Free the handle and release the parts, or let the last call do so. Idempotent."""
        self._handle = None
        self._entries = np.empty(0, np.uint8)
        self._names = None

    def _check_range(self, action: str, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.count:
            raise UsageError(
                f"{action} of {self.label}: expected a range in 0..{self.count}, "
                f"got {first}..{first + count}"
            )

    def load_names(self) -> None:
        """Check that the names are attached.

        Raises:
            ClosedError: the directory is closed.
            UsageError: they are not attached.
        """
        if self._names is None:
            _ = self.handle  # raises ClosedError if another thread has closed the directory
            raise UsageError(f"use the names of {self.label}: expected them attached first")
