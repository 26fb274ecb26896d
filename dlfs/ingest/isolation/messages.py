"""The messages of the process that reads a source: MessagePack, of which each part has a type.

The libraries in that process read strangers' files, so the other process trusts no message: it
decodes plain values and arrays of plain elements, and nothing that could run code, as pickles can.
Texts are bytes, because names of files may be no UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from dlfs.errors import DeviceError, DlfsError, FormatError, restore_error
from dlfs.format.bad_records import BadRecord
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.source import SampleBlock, Source


class Array(msgspec.Struct, frozen=True):
    """An array: the bytes of its elements, or its texts if the dtype is ``O``."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | list[bytes]

    @classmethod
    def of(cls, array: Any) -> Array:
        """Return the message of a numpy array of numbers, times or texts."""
        if array.dtype.hasobject:
            return cls("O", array.shape, [to_bytes(text) for text in array.reshape(-1).tolist()])
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> Any:
        """Return the numpy array.

        Raises:
            ValueError: the data is not what dtype and shape say.
        """
        import numpy as np

        if isinstance(self.data, list):
            return np.array([to_text(text) for text in self.data], object).reshape(self.shape)
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape).copy()


class NewBad(msgspec.Struct, frozen=True):
    """Bad records that were noted since the message before."""

    reasons: dict[bytes, Annotated[int, msgspec.Meta(ge=0)]]
    records: list[tuple[bytes, bytes, bytes]]

    @classmethod
    def of(cls, bad: BadRecords) -> NewBad:
        """Return the message of the bad records that none has yet."""
        return cls.of_report(*bad.take_new())

    @classmethod
    def of_report(cls, reasons: Mapping[str, int], records: Iterable[BadRecord]) -> NewBad:
        """Return the message of some bad records: number of them by kind, and the listed ones."""
        return cls(
            {to_bytes(kind): count for kind, count in reasons.items()},
            [(to_bytes(one.source), to_bytes(one.record), to_bytes(one.reason)) for one in records],
        )

    def contents(self) -> tuple[dict[str, int], list[BadRecord]]:
        """Return the number of bad records by kind, and the listed ones."""
        records = [
            BadRecord(to_text(source), to_text(record), to_text(reason))
            for source, record, reason in self.records
        ]
        return {to_text(kind): count for kind, count in self.reasons.items()}, records

    def add_to(self, bad: BadRecords) -> None:
        """Add the bad records to those of the import.

        Raises:
            TooManyBadError: there are more than allowed.
        """
        bad.add(*self.contents())


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Attributes of a source: when it was opened, and when all of it was read."""

    name: bytes
    sample_count: int | None
    sample_bytes: int | None
    gives_shuffled: bool
    gives_runs: bool
    skipped: dict[bytes, int]
    left_out: int
    empty_directories: list[bytes]
    buffer_bytes: int
    undivided: bytes
    separate_files: list[bytes]
    shared: bytes
    file_facts: list[bytes]
    new_bad: NewBad

    @classmethod
    def of(cls, source: Source) -> Facts:
        """Return the attributes of a source."""
        count, size = source.sample_count, source.sample_bytes
        return cls(
            to_bytes(source.name),
            None if count is None else int(count),
            None if size is None else int(size),
            bool(source.gives_shuffled),
            bool(source.gives_runs),
            {to_bytes(reason): int(number) for reason, number in source.skipped.items()},
            int(source.left_out),
            list(source.empty_directories),
            int(source.buffer_bytes),
            to_bytes(source.undivided),
            [to_bytes(path) for path in source.separate_files],
            source.shared,
            list(source.file_facts),
            NewBad.of(source.bad),
        )

    def take(self, source: Source) -> None:
        """Give a source these attributes."""
        for name in set(self.__struct_fields__) - {"new_bad"}:
            setattr(source, name, getattr(self, name))
        self.new_bad.add_to(source.bad)
        source.name, source.undivided = to_text(self.name), to_text(self.undivided)
        source.separate_files = [to_text(path) for path in self.separate_files]
        source.skipped = {to_text(reason): number for reason, number in self.skipped.items()}


class Block(msgspec.Struct, frozen=True, tag=True):
    """A block of samples, whose data is in a shared buffer."""

    buffer: int
    size_bytes: int
    paths: list[bytes]
    offsets: Array
    lengths: Array
    attributes: dict[bytes, Array]
    cursor: bytes
    new_bad: NewBad

    def columns(self) -> dict[str, Any]:
        """Return the array of each attribute."""
        return {to_text(name): values.array() for name, values in self.attributes.items()}

    def position(self) -> dict[str, Any] | None:
        """Return the cursor: JSON, as it will be stored."""
        value = json.loads(self.cursor) if self.cursor else None
        if not isinstance(value, dict | None):
            raise TypeError(f"a cursor that is {type(value).__name__}")
        return value


class End(msgspec.Struct, frozen=True, tag=True):
    """The end of the blocks."""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """An error: its class in ``dlfs.errors``, its text, its errno and its notes."""

    kind: str
    text: bytes
    code: int | None
    notes: list[bytes]

    @classmethod
    def of(cls, error: Exception, where: str) -> Failure:
        """Return the message of an error; any that is not ours is an error of the file."""
        if not isinstance(error, DlfsError):
            kind = type(error).__name__
            text = f"{where}: expected a readable file, got {kind}: {' '.join(str(error).split())}"
            return cls(FormatError.__name__, to_bytes(text), None, [])
        code = error.errno if isinstance(error, DeviceError) else None
        notes = [to_bytes(note) for note in getattr(error, "__notes__", [])]
        return cls(type(error).__name__, to_bytes(str(error)), code, notes)

    def error(self) -> DlfsError:
        """Return the error."""
        text = to_text(self.text)
        error = restore_error(self.kind, text, self.code or 0, otherwise=FormatError)
        for note in self.notes:
            error.add_note(to_text(note))
        return error


Message = Facts | Block | End | Failure

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """Return a message.

    Raises:
        msgspec.MsgspecError: the bytes are none.
    """
    return _decoder.decode(data)


def block_message(
    number: int, size_bytes: int, offsets: Any, block: SampleBlock, bad: BadRecords
) -> Block:
    """Return the message of a block whose data was copied into a buffer."""
    columns: Mapping[str, Any] = block.attributes
    return Block(
        number,
        size_bytes,
        block.paths,
        Array.of(offsets),
        Array.of(block.lengths),
        {to_bytes(name): Array.of(values) for name, values in columns.items()},
        b"" if block.cursor is None else json.dumps(block.cursor).encode(),
        NewBad.of(bad),
    )


def to_bytes(text: str) -> bytes:
    """Return a text as bytes, also one with halves of surrogate pairs."""
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes) -> str:
    """Return the text that ``to_bytes`` encoded."""
    return data.decode("utf-8", "surrogatepass")
