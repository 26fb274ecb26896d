"""The control protocol between the node service and its clients, on a Unix stream socket.

A frame is a length of four bytes, little-endian, and that many bytes of JSON. The JSON is one
object: its ``kind`` names a message of this module, its other fields are the fields of the message.
File descriptors travel with the frame that they belong to (SCM_RIGHTS). Only the service sends
descriptors: it reads without room for them, so the kernel drops any that a client attaches.

The client begins with ``Hello``, which the service answers with ``Welcome``. The service then
answers each request in turn, with the answer that the request's docstring names or with
``Failure``, which carries one of this package's errors. While a request waits for devices, the
service sends ``Pending`` before the answer, once a second: how long to wait for devices is for
their URIs to say, and a client gives up only a service from which nothing comes. Samples do not
travel on this socket: they lie in memory that service and client share (``dlfs._native.channel``).

Neither side trusts the other. A frame's length is checked before its body is read. An unknown kind,
an unknown or missing field, and a value of another type or out of range are a ``FormatError``.
Inside ``VolumeInfo``, which only the service sends, unknown fields are ignored.
``dlfs.base.json_records`` checks the types.

Client and service must speak the same ``PROTOCOL_VERSION``.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any
from uuid import UUID

import msgspec

from dlfs.base.json_records import excerpt, parse_json, to_json, to_record
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NativeError,
    TruncatedError,
    restore_error,
)
from dlfs.store.info import VolumeInfo

PROTOCOL_VERSION = 10
FRAME_BYTES_MAX = 1 << 20
"""Longest body of a frame, in bytes. Catalogs and directories may be longer: they travel as
descriptors."""
DESCRIPTORS_MAX = 8
"""Most file descriptors that travel with one frame."""
HEADER = struct.Struct("<I")
MESSAGE_BYTES_MAX = 4096
"""Longest text of an error in a ``Failure``, in characters."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Readers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """IDs of the users and groups that may read a volume."""

    users: tuple[Count, ...] = ()
    groups: tuple[Count, ...] = ()


class Message(msgspec.Struct, frozen=True, tag_field="kind", tag=True, forbid_unknown_fields=True):
    """Base class of all messages; messages are immutable."""


# ---- requests ------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Begin a connection. Answered by ``Welcome``."""

    protocol: Count
    version: str


class ListVolumes(Message, frozen=True):
    """List the volumes that the client may read. Answered by ``Volumes``.

    With ``wanted``, a label or UUID, the answer is a ``Failure`` if only volumes have it that the
    client may not read.
    """

    wanted: str = ""


class GetVolume(Message, frozen=True):
    """Get the newest generation of a volume. Answered by ``VolumeState``."""

    volume: UUID


class OpenDataset(Message, frozen=True):
    """Open a dataset until the connection ends. Answered by ``DatasetState``.

    With ``fields``, names of consecutive fields, only these are read of each sample.
    """

    volume: UUID
    dataset: UUID
    fields: tuple[str, ...] = ()


class GetSteps(Message, frozen=True):
    """Get headers of steps of an unfinished import. Answered by ``Steps``.

    Attributes:
        volume: UUID of the volume.
        dataset: UUID of the dataset that the import makes.
        first: number of the first step.
    """

    volume: UUID
    dataset: UUID
    first: Count


class OpenStep(Message, frozen=True):
    """Open a step of an unfinished import until the connection ends. Answered by ``DatasetState``.

    Further requests of the connection name it by the UUID of the dataset.

    Attributes:
        volume: UUID of the volume.
        dataset: UUID of the dataset that the import makes.
        number: number of the step.
    """

    volume: UUID
    dataset: UUID
    number: Count


class GetSegment(Message, frozen=True):
    """Get a segment: ``entries``, ``names`` or ``attributes``. Answered by ``Segment``."""

    volume: UUID
    dataset: UUID
    segment: str


class OpenChannel(Message, frozen=True):
    """Open a channel to the samples of an open dataset. Answered by ``ChannelState``.

    The channel ends when the client closes its side of the channel's socket.
    """

    dataset: UUID


class Diagnose(Message, frozen=True):
    """Check that an open dataset can still be read. Answered by ``Diagnosis``."""

    dataset: UUID


class GetStatistics(Message, frozen=True):
    """Get the counters of the service. Answered by ``Statistics``."""


class AttachVolume(Message, frozen=True):
    """Serve one more volume, given the URIs of its members. Answered by ``Attached``.

    Only root and the user of the service may attach, detach, publish and unpublish, at the
    service's own socket.

    Attributes:
        members: URIs of the members.
        readers: who may read it; None: who may use the service.
        memory_bytes: memory for its samples, if it has a rule; None: a share.
    """

    members: tuple[str, ...]
    readers: Readers | None = None
    memory_bytes: Count | None = None


class DetachVolume(Message, frozen=True):
    """Stop serving a volume. Answered by ``Detached``.

    With ``force`` also while clients or programs on the mount use it; they get errors.
    """

    volume: UUID
    force: bool


class PublishSocket(Message, frozen=True):
    """Listen at one more socket, through which volumes can be read. Answered by ``Published``.

    Attributes:
        name: name of the socket.
        volumes: label or UUID of each volume that the service serves.
        note: text by which the caller knows the socket.
        attach: URIs of the members of each further volume. One that the service does not serve is
            attached, for root alone, and detached with the last socket that is published for it.
        memory_bytes: memory for the samples of each volume that is attached; None: a share.
    """

    name: str
    volumes: tuple[str, ...]
    note: str = ""
    attach: tuple[tuple[str, ...], ...] = ()
    memory_bytes: Count | None = None


class UnpublishSocket(Message, frozen=True):
    """Close a published socket, and end its clients. Answered by ``Unpublished``."""

    name: str


class ConnectIncoming(Message, frozen=True):
    """Connect to the server of the staging area (``dlfs.staging``). Answered by ``Incoming``."""


# ---- answers -------------------------------------------------------------------------------------


class VolumeName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """UUID and label of a volume that the service serves."""

    uuid: UUID
    label: str


class Welcome(Message, frozen=True):
    """The service accepts the client; ``pid`` is the service's process ID."""

    protocol: Count
    version: str
    pid: Count


class Volumes(Message, frozen=True):
    """The volumes that the client may read."""

    volumes: tuple[VolumeName, ...]


class VolumeState(Message, frozen=True):
    """A volume at its newest generation.

    One descriptor: a file with superblock and catalog as on media (``generation_file``).
    """

    info: VolumeInfo


class DatasetState(Message, frozen=True):
    """The service has opened the dataset.

    Two descriptors: a file with superblock and catalog as on media, or with the segments of the
    step as on media; and the sample memory (arena) of the dataset.

    Attributes:
        members: URIs of the volume's members, in order.
        arena_bytes: size of the arena.
        read_timeout_ms: time within which the service reads a sample or reports the failure.
        fields: names of the fields that are read of each sample; empty if samples are read whole,
            although the request had fields.
    """

    members: tuple[str, ...]
    arena_bytes: Count
    read_timeout_ms: Count
    fields: tuple[str, ...] = ()


class Steps(Message, frozen=True):
    """Headers of steps. One descriptor: a file with ``count`` headers as on media."""

    count: Count


class Segment(Message, frozen=True):
    """A segment of a dataset. One descriptor: a file of ``size_bytes`` with the segment."""

    size_bytes: Count


class ChannelState(Message, frozen=True):
    """A channel is open. Two descriptors, as of ``ServerChannel``: memory and wake socket."""


class Diagnosis(Message, frozen=True):
    """The reason why a dataset can no longer be read; None if it can."""

    reason: str | None
    moved: bool = False
    """True if its samples were moved to other chunks; the client opens it again."""


class Statistics(Message, frozen=True):
    """Counters of the service by name, nested; see ``ServerState.snapshot``."""

    values: dict[str, Any]


class Attached(Message, frozen=True):
    """The service serves the volume; ``mount`` is its mount point, or None."""

    volume: VolumeName
    mount: str | None


class Detached(Message, frozen=True):
    """The service does not serve the volume any more."""


class Published(Message, frozen=True):
    """The service listens at the socket with this path."""

    path: str


class Unpublished(Message, frozen=True):
    """The service does not listen at the socket any more, and its clients are gone."""


class Incoming(Message, frozen=True):
    """A connection to the server of the staging area: one descriptor, of a stream socket."""


class Pending(Message, frozen=True):
    """The service works on the request; the answer follows."""


class Failure(Message, frozen=True):
    """A request failed: class name of the error, its text, and its errno or 0."""

    error: str
    message: str
    code: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


REQUESTS: tuple[type[Message], ...] = (
    Hello, ListVolumes, GetVolume, OpenDataset, GetSteps, OpenStep, GetSegment, OpenChannel,
    Diagnose, GetStatistics, AttachVolume, DetachVolume, PublishSocket, UnpublishSocket,
    ConnectIncoming,
)  # fmt: skip
ANSWERS: tuple[type[Message], ...] = (
    Welcome, Volumes, VolumeState, DatasetState, Steps, Segment, ChannelState, Diagnosis,
    Statistics, Attached, Detached, Published, Unpublished, Incoming, Pending, Failure,
)  # fmt: skip


# ---- frames --------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return the frame of a message.

    Raises:
        LimitError: the message is longer than a frame may be.
    """
    body = to_json(message)
    if len(body) > FRAME_BYTES_MAX:
        raise LimitError(
            f"send {type(message).__name__}: expected at most {FRAME_BYTES_MAX} bytes, "
            f"got {len(body)}"
        )
    return HEADER.pack(len(body)) + body


def body_bytes(header: bytes | bytearray) -> int:
    """Return the length of a frame's body, in bytes.

    Raises:
        FormatError: the other side announces a body longer than a frame may have.
        TruncatedError: the header is incomplete.
    """
    if len(header) != HEADER.size:
        raise TruncatedError(
            f"read a frame: expected a header of {HEADER.size} bytes, got {len(header)}"
        )
    (length,) = HEADER.unpack(header)
    if not 2 <= length <= FRAME_BYTES_MAX:
        raise FormatError(f"read a frame: expected 2..{FRAME_BYTES_MAX} bytes, got {length}")
    return int(length)


def decode(body: bytes | bytearray, kinds: tuple[type[Message], ...]) -> Message:
    """Return the message in a frame's body.

    Args:
        body: body of the frame.
        kinds: messages to accept: ``REQUESTS`` or ``ANSWERS``.

    Raises:
        FormatError: the body is malformed or holds another message.
    """
    try:
        values = parse_json(body)
        name = values.get("kind") if isinstance(values, dict) else None
        kind = next((kind for kind in kinds if kind.__name__ == name), None)
        if kind is None:
            raise FormatError(f"expected a known kind, got {excerpt(body)}")
        return to_record(values, kind)
    except FormatError as error:
        raise FormatError(f"read a message: {error}") from error


def failure_of(error: Exception) -> Failure:
    """Return the message for an error.

    An ``OSError`` becomes a ``DeviceError``, any other foreign error a ``NativeError``.
    """
    if isinstance(error, DlfsError):
        name = type(error).__name__
    else:
        name = DeviceError.__name__ if isinstance(error, OSError) else NativeError.__name__
    code = error.errno if isinstance(error, OSError) and error.errno else 0
    return Failure(name, str(error)[:MESSAGE_BYTES_MAX], code)


def error_of(failure: Failure) -> DlfsError:
    """Return the error that a ``Failure`` carries; a ``NativeError`` if its class is unknown."""
    return restore_error(failure.error, failure.message, failure.code)
