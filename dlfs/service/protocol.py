"""The control protocol between the node service and its clients, on a Unix stream socket.

A frame is four bytes of length, little-endian, and that many bytes of JSON: one object, whose
``kind`` names a message of this module and whose other fields are the message's, each of its type.
File descriptors ride on the frame they belong to (SCM_RIGHTS); only the service sends any, so the
service reads without room for them and the kernel drops what a client attaches.

The client speaks first: ``Hello``, answered by ``Welcome``. Then every request is answered in turn,
by the answer that is named with it, or by ``Failure``, which stands for one of this package's
errors. Samples do not pass here: a channel's do, through shared memory (``dlfs._native.channel``).

Nothing is believed: lengths are bounded before anything is read, unknown kinds, unknown or missing
fields and values of another type or out of range are a ``FormatError``, on either side.
"""

from __future__ import annotations

import errno
import functools
import json
import struct
import types
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from dlfs import errors
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError, NativeError, TruncatedError
from dlfs.store.info import VolumeInfo

PROTOCOL_VERSION = 3
FRAME_BYTES_MAX = 1 << 20
"""Of JSON. What may be larger (catalogs, directories) goes by a descriptor."""
DESCRIPTORS_MAX = 8
"""With one frame."""
HEADER = struct.Struct("<I")
MESSAGE_BYTES_MAX = 4096
"""Of an error's text."""

_INTEGER_MAX = (1 << 64) - 1


class Message:
    """Base of all messages: immutable values."""


# ---- what clients say ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first message. Answered by ``Welcome``."""

    protocol: int
    version: str


@dataclass(frozen=True, slots=True)
class ListVolumes(Message):
    """Which volumes are served? Answered by ``Volumes``."""


@dataclass(frozen=True, slots=True)
class LookAtVolume(Message):
    """What is a volume now? Answered by ``VolumeState``."""

    volume: UUID


@dataclass(frozen=True, slots=True)
class OpenDataset(Message):
    """Have a dataset open, until the connection ends. Answered by ``DatasetState``."""

    volume: UUID
    dataset: UUID


@dataclass(frozen=True, slots=True)
class GetPart(Message):
    """A part of a dataset: ``entries``, ``names`` or ``attributes``. Answered by ``Part``."""

    volume: UUID
    dataset: UUID
    part: str


@dataclass(frozen=True, slots=True)
class OpenChannel(Message):
    """A way to read samples of an open dataset; it ends when the client closes its side of it.

    Answered by ``ChannelState``.
    """

    dataset: UUID


@dataclass(frozen=True, slots=True)
class Diagnose(Message):
    """Can an open dataset still be read? Answered by ``Diagnosis``."""

    dataset: UUID


@dataclass(frozen=True, slots=True)
class GetSnapshot(Message):
    """What the service does, in numbers. Answered by ``Figures``."""


# ---- what the service answers --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServedVolume:
    """What a volume is called."""

    uuid: UUID
    label: str


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The client may go on."""

    protocol: int
    version: str
    pid: int


@dataclass(frozen=True, slots=True)
class Volumes(Message):
    """The volumes that are served."""

    volumes: tuple[ServedVolume, ...]


@dataclass(frozen=True, slots=True)
class VolumeState(Message):
    """A volume at its newest generation; a descriptor of its superblock and catalog as on media."""

    info: VolumeInfo


@dataclass(frozen=True, slots=True)
class DatasetState(Message):
    """A dataset is open.

    Descriptors: of superblock and catalog as on media; of the arena that its samples lie in.
    """

    members: tuple[str, ...]
    arena_bytes: int
    read_timeout_ms: int
    """Within which the service has read a sample, or says why not."""


@dataclass(frozen=True, slots=True)
class Part(Message):
    """A part of a dataset, with a descriptor of its memory."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ChannelState(Message):
    """A channel is open; its descriptors are those of ``ServerChannel``: memory and wake."""


@dataclass(frozen=True, slots=True)
class Diagnosis(Message):
    """Why a dataset is not there any more; None: it is."""

    reason: str | None


@dataclass(frozen=True, slots=True)
class Figures(Message):
    """Counters by name, perhaps nested."""

    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done(Message):
    """It was done."""


@dataclass(frozen=True, slots=True)
class Failure(Message):
    """It was not done: the class of the error, its text, and its errno or 0."""

    error: str
    message: str
    code: int


REQUESTS: tuple[type[Message], ...] = (
    Hello, ListVolumes, LookAtVolume, OpenDataset, GetPart, OpenChannel, Diagnose,
    GetSnapshot,
)  # fmt: skip
ANSWERS: tuple[type[Message], ...] = (
    Welcome, Volumes, VolumeState, DatasetState, Part, ChannelState, Diagnosis, Figures,
    Done, Failure,
)  # fmt: skip


# ---- frames --------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """A message as a frame.

    Raises:
        LimitError: it is too long.
    """
    body = json.dumps({"kind": type(message).__name__, **_plain_fields(message)}).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise LimitError(
            f"send {type(message).__name__}: expected at most {FRAME_BYTES_MAX} bytes, "
            f"got {len(body)}"
        )
    return HEADER.pack(len(body)) + body


def body_bytes(header: bytes | bytearray) -> int:
    """The length of a frame's body.

    Raises:
        FormatError: it is longer than a frame may be (LimitError is ours, this is theirs).
        TruncatedError: the header is not whole.
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
    """The message in a frame's body.

    Args:
        body: of the frame.
        kinds: that are expected: ``REQUESTS`` or ``ANSWERS``.

    Raises:
        FormatError: it is none of them, or malformed.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"read a message: expected JSON, got {_excerpt(body)}") from error
    name = found.pop("kind", None) if isinstance(found, dict) else None
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    if kind is None:
        raise FormatError(f"read a message: expected a known kind, got {_excerpt(body)}")
    message: Message = _typed(kind, found, kind.__name__)
    return message


def failure_of(error: Exception) -> Failure:
    """An error as a message; what is no error of this package is an unspecific one."""
    if isinstance(error, DlfsError):
        name = type(error).__name__
    else:
        name = DeviceError.__name__ if isinstance(error, OSError) else NativeError.__name__
    code = error.errno if isinstance(error, OSError) and error.errno else 0
    return Failure(name, str(error)[:MESSAGE_BYTES_MAX], code)


def error_of(failure: Failure) -> DlfsError:
    """The error that a message stands for."""
    kind = getattr(errors, failure.error, None)
    if not (isinstance(kind, type) and issubclass(kind, DlfsError)):
        return NativeError(f"{failure.error}: {failure.message}")
    if issubclass(kind, DeviceError):
        return kind(failure.message, failure.code or errno.EIO)
    return kind(failure.message)


def _excerpt(body: bytes | bytearray) -> str:
    return repr(bytes(body[:80]))


# ---- values --------------------------------------------------------------------------------------


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass and their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind)


def _plain_fields(value: Any) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in _types(value.__class__)}


def _plain(value: Any) -> Any:
    """What JSON has for a value."""
    if _is_record(value):
        return _plain_fields(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, UUID):
        return value.hex
    return value.isoformat() if isinstance(value, datetime) else value


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as a type of this protocol.

    Raises:
        FormatError: it is none of that type.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (other,) = (choice for choice in get_args(kind) if choice is not type(None))
        return None if value is None else _typed(other, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(get_args(kind)[0], item, where) for item in value)
    if isinstance(value, dict):
        if origin is dict:
            return value
        if _is_record(kind) and value.keys() == _types(kind).keys():
            return kind(
                **{
                    name: _typed(of, value[name], f"{where}.{name}")
                    for name, of in _types(kind).items()
                }
            )
    made = _scalar(kind, value)
    if made is None:
        raise FormatError(f"read a message: expected {where} of {kind}, got {str(value)[:80]!r}")
    return made


def _scalar(kind: Any, value: Any) -> Any:
    """A number, text, UUID or time; None when it is none."""
    if kind is int:
        return value if type(value) is int and abs(value) <= _INTEGER_MAX else None
    if kind in (bool, str):
        return value if type(value) is kind else None
    if type(value) is not str:
        return None
    try:
        if kind is UUID:
            return UUID(hex=value)
        return datetime.fromisoformat(value) if kind is datetime else None
    except ValueError:
        return None
