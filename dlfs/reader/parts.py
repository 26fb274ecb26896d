"""Reads samples, or ranges of them, into a caller's buffer, and in pieces.

libdlfs verifies what is touched: the chunks that the range of a large sample lies in, or the whole
of a small one. So nothing is returned unverified, and no more memory is needed than for the range.

Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from dlfs._native.parts import SamplePart, make_bytes
from dlfs.base.units import MIB
from dlfs.base.wording import show_value
from dlfs.errors import UsageError
from dlfs.reader.following import follow

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from dlfs.reader.reader import SampleReader

PIECE_BYTES = 8 * MIB
"""Length of a piece, in bytes; a pending Ctrl-C is handled between two."""


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


def fill(reader: SampleReader, index: int, buffer: memoryview, offset_bytes: int) -> None:
    """Fill a buffer from an offset of a sample on.

    Args:
        reader: reader of the dataset.
        index: index of the sample, 0..N-1.
        buffer: ``uint8[n_bytes]``, all within the sample.
        offset_bytes: first byte in the sample.

    Raises:
        ChecksumError: a part of the sample that the buffer touches is damaged.
        DlfsError: it cannot be read; MovedError if another reader must read it.
    """
    for start in range(0, buffer.nbytes, PIECE_BYTES):
        piece = buffer[start : start + PIECE_BYTES]
        failure = reader.native.read_part(SamplePart(index, offset_bytes + start), piece)
        if failure.code < 0:
            raise reader.explain(failure)


def read_bytes(reader: SampleReader, index: int) -> bytes:
    """Read a sample; the returned bytes are its only copy in memory, besides chunks of it.

    Raises:
        DlfsError: as ``fill``.
    """
    return make_bytes(
        int(reader.directory.lengths([index])[0]), lambda memory: fill(reader, index, memory, 0)
    )


def read_into(reader: SampleReader, index: int, buffer: Buffer, offset_bytes: int) -> int:
    """Read a sample, or a range of it, into a buffer; see ``Dataset.read_into``."""
    length = int(reader.directory.lengths([index])[0])
    wanted = writable_view(buffer)[: max(0, length - offset_bytes)]
    if wanted.nbytes:
        fill(reader, index, wanted, offset_bytes)
    return wanted.nbytes


def read_pieces(open_reader: Callable[[], SampleReader], index: int) -> Iterator[memoryview]:
    """Read a sample in pieces; see ``Dataset.read_pieces``.

    Args:
        open_reader: returns the reader of the dataset; another one if the dataset was moved.
        index: index of the sample, 0..N-1.
    """
    length = int(open_reader().directory.lengths([index])[0])
    memory = memoryview(bytearray(min(PIECE_BYTES, length)))
    for start in range(0, length, PIECE_BYTES):
        piece = memory[: length - start]
        follow(open_reader, partial(fill, index=index, buffer=piece, offset_bytes=start))
        yield piece.toreadonly()
