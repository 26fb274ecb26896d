"""Reads samples that are larger than the memory for them: into a caller's buffer, or in pieces.

A sample of up to ``WHOLE_BYTES_MAX`` is read as a batch of one and verified before the caller gets
it. A larger sample is read part by part and has no second copy in memory. Its checksum covers the
whole sample, so that it is verified only after the last part. A buffer is filled and then verified.
Of pieces, the last one is returned only if the checksum is right. After each part that is returned
without a checksum, it is checked that no one has moved the sample's chunks (``Placement``); so such
bytes may be damaged, but are not those of other data.

With replicas, a sample with a wrong checksum is read again without each member in turn, as in
batches. A sample that is returned in pieces is therefore first read through once, to find the
member to avoid.

Threads: any at once; of one ``LargeSample``, ``read_part`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlfs._native import abi
from dlfs._native.batch import NativeFailure
from dlfs._native.checksums import crc32c
from dlfs._native.parts import SamplePart, make_bytes
from dlfs.errors import ChecksumError, DlfsError, UsageError
from dlfs.reader.following import MOVES_MAX, MovedError, follow
from dlfs.units import MIB, format_bytes
from dlfs.wording import show_value

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dlfs.reader.reader import SampleReader

WHOLE_BYTES_MAX = 64 * MIB
"""Longest sample that is read as a whole although pieces are requested, in bytes."""

PIECE_BYTES = 8 * MIB
"""Length of a piece, in bytes."""


def writable_view(buffer: Buffer) -> memoryview:
    """Return the bytes of a caller's buffer, ``uint8[n_bytes]``.

    Raises:
        UsageError: it is no buffer, read-only, or not contiguous.
    """
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise UsageError(
            f"read into a buffer: expected a bytearray, an array or the like, got "
            f"{show_value(buffer)}"
        ) from error
    if view.readonly or not view.c_contiguous:
        problem = "read-only memory" if view.readonly else "memory with gaps"
        raise UsageError(f"read into a buffer: expected contiguous, writable memory, got {problem}")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


@dataclass(slots=True)
class PiecesRead:
    """The pieces of a sample that were read so far."""

    end_bytes: int = 0
    """End of the last piece, in bytes."""
    crc: int = 0
    """CRC32C of all of them."""


class LargeSample:
    """One sample that is read part by part.

    Args:
        reader: reader of the dataset.
        index: index of the sample, 0..N-1.
    """

    def __init__(self, reader: SampleReader, index: int) -> None:
        self._reader = reader
        self.index = index
        self.length_bytes = int(reader.directory.lengths([index])[0])
        self._address = int(reader.directory.addresses([index])[0])
        self._crc32c = int(reader.directory.crcs([index])[0])
        self._found: NativeFailure | None = None
        """Location of a part that was read, for the error of a wrong checksum."""
        self._avoided_member: int | None = None

    def read_part(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill a buffer from an offset of the sample on, without a checksum.

        Raises:
            DeviceError, FormatError: the sample cannot be read.
            StaleError: the dataset was removed; MovedError if it has other chunks now.
        """
        self._read(buffer, offset_bytes)
        error = self._reader.check_placement(self._address + offset_bytes, buffer.nbytes)
        if error is not None:
            raise error

    def _read(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill a buffer; the chunks may be those of other data by now."""
        for start in range(
            0, buffer.nbytes, PIECE_BYTES
        ):  # a pending Ctrl-C is handled between two
            piece = buffer[start : start + PIECE_BYTES]
            part = SamplePart(self.index, offset_bytes + start, self._avoided_member)
            found = self._reader.native.read_part(part, piece)
            if found.code < 0:
                raise self._reader.explain(found)
            self._found = found

    def read_whole(self, buffer: memoryview) -> None:
        """Fill a buffer with the whole sample, and verify it.

        Raises:
            ChecksumError: no copy of the sample is right.
            DlfsError: as ``read_part``.
        """

        def read() -> int:
            crc = 0
            for start in range(0, buffer.nbytes, PIECE_BYTES):
                piece = buffer[start : start + PIECE_BYTES]
                self._read(piece, start)
                crc = crc32c(piece, crc)
            return crc

        self._read_right(read)

    def verify(self) -> None:
        """Read the sample through in bounded memory; later parts are read from right copies.

        Raises:
            DlfsError: as ``read_whole``.
        """

        def read() -> int:
            memory = memoryview(bytearray(min(PIECE_BYTES, self.length_bytes)))
            crc = 0
            for start in range(0, self.length_bytes, PIECE_BYTES):
                piece = memory[: self.length_bytes - start]
                self._read(piece, start)
                crc = crc32c(piece, crc)
            return crc

        self._read_right(read)

    def pieces(self, progress: PiecesRead) -> Iterator[memoryview]:
        """Return the sample in pieces of ``PIECE_BYTES``, the last one after verification.

        A piece is valid until the next one is requested.

        Args:
            progress: pieces that were read before; it is advanced.

        Raises:
            DlfsError: as ``read_whole``; MovedError if another reader must read on.
        """
        if self._reader.has_copies:
            self.verify()
        memory = memoryview(bytearray(min(PIECE_BYTES, self.length_bytes)))
        while progress.end_bytes < self.length_bytes:
            start = progress.end_bytes
            piece = memory[: self.length_bytes - start]
            self.read_part(piece, start)
            crc = crc32c(piece, progress.crc)
            end = start + piece.nbytes
            if end == self.length_bytes and crc != self._crc32c:
                raise self._damaged(crc, start)
            progress.end_bytes, progress.crc = end, crc
            yield piece.toreadonly()

    def _read_right(self, read: Callable[[], int]) -> None:
        """Read until the checksum is right, avoiding one member after the other.

        Args:
            read: reads the sample, and returns its CRC32C.

        Raises:
            ChecksumError: no reading is right.
            DlfsError: the first reading failed.
        """
        self._avoided_member = None
        first = crc = read()
        problem: DlfsError | None = None
        for member in self._members():
            if crc == self._crc32c:
                return
            self._avoided_member = member
            try:
                crc = read()
            except DlfsError as error:
                problem = error
        if crc != self._crc32c:
            raise self._damaged(first, 0) from problem

    def _members(self) -> list[int | None]:
        """Return the members to avoid in turn; without replicas None, for one retry."""
        return list(range(self._reader.member_count)) if self._reader.has_copies else [None]

    def _damaged(self, crc: int, returned_bytes: int) -> DlfsError:
        assert self._found is not None  # a part of it was read
        failure = replace(self._found, code=abi.E_CHECKSUM, crc_got=crc)
        error = self._reader.explain(failure)
        if returned_bytes and isinstance(error, ChecksumError):
            error.add_note(
                f"the first {format_bytes(returned_bytes)} of it were given out before that was "
                "known"
            )
        return error


def is_large(reader: SampleReader, index: int) -> bool:
    """Return True if a sample is read part by part."""
    return int(reader.directory.lengths([index])[0]) > WHOLE_BYTES_MAX


def read_bytes(reader: SampleReader, index: int) -> bytes:
    """Read a large sample; the returned bytes are its only copy in memory.

    Raises:
        DlfsError: as ``LargeSample.read_whole``.
    """
    sample = LargeSample(reader, index)
    return make_bytes(sample.length_bytes, sample.read_whole)


def read_into(reader: SampleReader, index: int, buffer: Buffer, offset_bytes: int) -> int:
    """Read a sample, or a part of it, into a buffer; see ``Dataset.read_into``."""
    view = writable_view(buffer)
    sample = LargeSample(reader, index)
    wanted = view[: max(0, sample.length_bytes - offset_bytes)]
    if not wanted.nbytes:
        return 0
    if wanted.nbytes < sample.length_bytes:
        sample.read_part(wanted, offset_bytes)
    elif sample.length_bytes > WHOLE_BYTES_MAX:
        sample.read_whole(wanted)
    else:
        with reader.read([index]) as batch:
            wanted[:] = batch[0]
    return wanted.nbytes


def read_pieces(open_reader: Callable[[], SampleReader], index: int) -> Iterator[memoryview]:
    """Read a sample in pieces; see ``Dataset.read_pieces``.

    Args:
        open_reader: returns the reader of the dataset; another one if the dataset was moved.
        index: index of the sample, 0..N-1.
    """
    if is_large(open_reader(), index):
        progress = PiecesRead()
        for attempt in range(MOVES_MAX + 1):
            try:
                yield from LargeSample(open_reader(), index).pieces(progress)
            except MovedError:
                if attempt == MOVES_MAX:
                    raise
            else:
                return
    with follow(open_reader, lambda reader: reader.read([index])) as batch:
        data = batch[0]
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
