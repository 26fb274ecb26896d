"""The messages between the coordinator of an import and its workers: MessagePack.

Neither side trusts the other: every field has a type and a range, and nothing that is decoded could
run code, as pickles can. ``connection`` bounds their size.

A worker begins with ``Hello``; the coordinator answers with ``Welcome``. When the worker has opened
the devices (``Ready``), it gets a part (``StartPart``). It reports each step of the part
(``StepMade``), which the coordinator commits (``StepCommitted``); then it gets another part.
Meanwhile it asks for chunks (``NeedChunks``, ``Granted``) and for time (``Renew``, ``Renewed``),
and reports how far it is (``ProgressMade``). At the end the coordinator sends ``End``, and the
worker, when no write of it is in flight any more, ``Ended``. ``Failed`` is an error that ends the
import.
"""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlfs._native.device import aligned_buffer
from dlfs.dataset.step_content import StepContent, StepEnd
from dlfs.errors import DeviceError, DlfsError, FormatError, NativeError, restore_error
from dlfs.format.bad_records import BadReport
from dlfs.format.constants import MEMBERS_MAX
from dlfs.format.geometry import ChunkRun
from dlfs.format.journal import Cursor
from dlfs.ingest.isolation.messages import NewBad

PROTOCOL_VERSION = 1
RUNS_MAX = 4096
"""Most runs of one grant."""
SEGMENT_ALIGNMENT = 64
"""Alignment of segments in memory, in bytes (``native/src/directory/directory.h``)."""
TEXT_CHARACTERS_MAX = 4096
"""Most characters of an error's text and of each of its notes."""
NOTES_MAX = 16
"""Most notes of an error."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Key = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
"""A key of a host in reservations, little-endian."""
Text = Annotated[bytes, msgspec.Meta(max_length=4 * TEXT_CHARACTERS_MAX)]
Run = tuple[Count, Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]]
"""First chunk, and number of chunks."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of all messages."""


# ---- of workers ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Join an import. Answered by ``Welcome``, or by the end of the connection.

    Attributes:
        protocol: version of these messages.
        version: version of DLFS.
        secret: the secret of the import; empty over a UNIX socket, whose kernel says who connects.
        host: name of the worker's host, for messages and displays.
        boot_id: ID of the host's running system.
        pid: process ID, on its host.
    """

    protocol: Count
    version: Annotated[str, msgspec.Meta(max_length=64)]
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Count


class Ready(Message, frozen=True):
    """Tell that the devices are open for writing. Answered by ``StartPart``, if a part is left.

    Attributes:
        keys: key of the worker's host at the target of each member; None where it has none.
    """

    keys: Annotated[list[Key | None], msgspec.Meta(max_length=MEMBERS_MAX)]


class Renew(Message, frozen=True):
    """Ask for more time to write. Answered by ``Renewed``, unless the coordinator has none."""

    number: Count


class NeedChunks(Message, frozen=True):
    """Ask for chunks to write to. Answered by ``Granted``.

    Attributes:
        count: number of chunks.
        is_waiting: True if the worker has none left.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    is_waiting: bool


class ProgressMade(Message, frozen=True):
    """Report how far a part is, behind the last step that was reported; once when it begins.

    Attributes:
        part: number of the part.
        sample_count: samples since that step.
        sample_bytes: sum of their lengths.
        bad_count: bad records since that step.
    """

    part: Count
    sample_count: Count
    sample_bytes: Count
    bad_count: Count


class StepMade(Message, frozen=True):
    """Report a step whose data is on the devices: the fields of its ``StepContent``.

    Attributes:
        cursor: the cursor as JSON; empty without one.
        bad: number of bad records by kind, and the records that are listed.
    """

    part: Count
    number: Count
    source_count: Count
    cursor: bytes
    cursor_count: Count
    ends_part: bool
    runs: list[Run]
    sample_count: Count
    sample_bytes: Count
    path_bytes: Count
    window_count: Count
    entries: bytes
    names: bytes
    attributes: list[bytes]
    attributes_head_bytes: Count
    bad: NewBad

    @classmethod
    def of(cls, content: StepContent) -> StepMade:
        """Return the message of a step."""
        end, bad = content.end, content.bad
        return cls(
            content.part,
            content.number,
            end.source_count,
            b"" if end.cursor is None else end.cursor.json,
            0 if end.cursor is None else end.cursor.count,
            end.ends_part,
            [(run.first_chunk, run.chunk_count) for run in content.runs],
            content.sample_count,
            content.sample_bytes,
            content.path_bytes,
            content.window_count,
            content.entries.tobytes(),
            content.names.tobytes(),
            [part.tobytes() for part in content.attributes],
            content.attributes_head_bytes,
            NewBad.of_report(bad.reasons, bad.records),
        )

    def content(self) -> StepContent:
        """Return the step.

        Raises:
            FormatError: the cursor is none.
        """
        end = StepEnd(
            source_count=self.source_count,
            cursor=read_cursor(self.cursor, self.cursor_count),
            ends_part=self.ends_part,
        )
        reasons, records = self.bad.contents()
        return StepContent(
            part=self.part,
            number=self.number,
            end=end,
            runs=tuple(ChunkRun(first, count) for first, count in self.runs),
            sample_count=self.sample_count,
            sample_bytes=self.sample_bytes,
            path_bytes=self.path_bytes,
            window_count=self.window_count,
            entries=_aligned(self.entries),
            names=_aligned(self.names),
            attributes=[_aligned(part) for part in self.attributes],
            attributes_head_bytes=self.attributes_head_bytes,
            bad=BadReport(sum(reasons.values()), reasons, tuple(records)),
        )


class Failed(Message, frozen=True):
    """Report an error that another worker would meet as well.

    Attributes:
        kind: class of the error.
        text: its message, as ``to_bytes`` encodes it.
        code: its errno; 0 without.
        notes: its notes.
        part: number of the part that was read; None without.
    """

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    text: Text
    code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    notes: Annotated[list[Text], msgspec.Meta(max_length=NOTES_MAX)]
    part: Count | None

    @classmethod
    def of(cls, error: Exception, part: int | None) -> Failed:
        """Return the message of an error."""
        kind = type(error).__name__ if isinstance(error, DlfsError) else NativeError.__name__
        if isinstance(error, OSError) and not isinstance(error, DlfsError):
            kind = DeviceError.__name__
        text = str(error) if isinstance(error, DlfsError) else f"{type(error).__name__}: {error}"
        code = error.errno if isinstance(error, OSError) and error.errno else 0
        notes = [encode_text(note) for note in getattr(error, "__notes__", [])[:NOTES_MAX]]
        return cls(kind, encode_text(text), code, notes, part)

    def error(self) -> DlfsError:
        """Return the error."""
        error = restore_error(self.kind, decode_text(self.text), self.code)
        for note in self.notes:
            error.add_note(decode_text(note))
        return error


class Ended(Message, frozen=True):
    """Tell that no write of this worker is in flight, and that it makes no more."""


# ---- of the coordinator --------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Take a worker in.

    Attributes:
        worker: number of the worker in this run of the import.
        slot: number of its slot, which no other living worker has.
        setup: what it needs to know of the import; see ``import_setup.ImportSetup``.
        renew_s: interval between two requests for more time, in seconds.
        valid_s: longest time for which a request gives it, in seconds.
    """

    worker: Count
    slot: Count
    setup: bytes
    renew_s: float
    valid_s: float


class StartPart(Message, frozen=True):
    """Give a worker a part.

    Attributes:
        part: number of the part.
        description: the part, as ``Division.describe`` returns it.
        before: what the steps so far have; see ``import_setup.Before``.
    """

    part: Count
    description: bytes
    before: bytes


class Granted(Message, frozen=True):
    """Grant chunks, for as long as the worker may write."""

    runs: Annotated[list[Run], msgspec.Meta(min_length=1, max_length=RUNS_MAX)]


class Renewed(Message, frozen=True):
    """Give a worker more time.

    Attributes:
        number: number of the request; the time counts from before it was sent.
        valid_s: how long, in seconds; None if writes have no deadline.
    """

    number: Count
    valid_s: float | None


class StepCommitted(Message, frozen=True):
    """Tell that a step is committed."""

    part: Count
    number: Count


class End(Message, frozen=True):
    """End a worker, or refuse it in place of ``Welcome``. Answered by ``Ended``.

    Attributes:
        reason: why.
        failure: the error of the import, or of the worker that is refused; None without.
        goes_on: True if the import goes on without this worker.
    """

    reason: Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
    failure: Failed | None = None
    goes_on: bool = False


FromWorker = Hello | Ready | Renew | NeedChunks | ProgressMade | StepMade | Failed | Ended
FromCoordinator = Welcome | StartPart | Granted | Renewed | StepCommitted | End
AnyMessage = FromWorker | FromCoordinator

_encoder = msgspec.msgpack.Encoder()
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
"""Decodes what a worker sends."""
from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(
    FromCoordinator
)
"""Decodes what the coordinator sends."""


def encode(message: AnyMessage) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def encode_text(text: str) -> bytes:
    """Return the bytes of a text, also of one with halves of surrogate pairs, cut to the limit."""
    return text[:TEXT_CHARACTERS_MAX].encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Return the text that ``encode_text`` encoded.

    Raises:
        FormatError: the bytes are none.
    """
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError(f"read a message: expected a text, got {data[:40]!r}") from error


def pack_key(key: int) -> bytes:
    """Return a key of a host in reservations as a message has it."""
    return key.to_bytes(8, "little")


def unpack_key(key: bytes) -> int:
    """Return the key that ``pack_key`` packed."""
    return int.from_bytes(key, "little")


def read_cursor(value: bytes, count: int) -> Cursor | None:
    """Return the cursor of a message; None if it has none.

    Raises:
        FormatError: it is no object of JSON.
    """
    if not value:
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"read a message: expected a cursor in JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"read a message: expected a cursor, got {type(found).__name__}")
    return Cursor(found, count)


def _aligned(data: bytes) -> NDArray[np.uint8]:
    """Return bytes in memory that a directory can be opened in."""
    found = aligned_buffer(len(data), SEGMENT_ALIGNMENT)
    found[:] = np.frombuffer(data, np.uint8)
    return found
