"""The journal of an unfinished import (FORMAT.md, section 6.4): the samples of each of its steps.

A step begins with a header, which this module encodes and decodes. Behind it are the directory
segment of the step's samples and, if they have columns, their attribute segment.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any
from uuid import UUID

from dlfs._native.checksums import crc32c
from dlfs.errors import ChecksumError, FormatError
from dlfs.format.constants import (
    ADDRESS_MAX,
    DATASET_SAMPLES_MAX,
    FIRST_PASS_BYTES,
    PART_MAX,
    TAG_FIRST_PASS,
    TAG_TERM,
    TERM_BYTES,
)

STEP_HEADER_BYTES = 4096
STEP_SAMPLES = 1 << 19
"""Samples after which a step ends, however small they are: its writer has their paths in memory."""
_MAGIC = b"DLFSJRN1"
_VERSION = 1
_START = struct.Struct("<8sII16s")
_FIELDS = struct.Struct("<16Q")
_CRC = struct.Struct("<I")
_FIRST_PASS = struct.Struct("<3Q")
_EXPIRY = struct.Struct("<Q")
_TERM_VALUE_BYTES = TERM_BYTES - _EXPIRY.size
_COVERED = STEP_HEADER_BYTES - _CRC.size
_CURSOR_AT = _START.size + _FIELDS.size
CURSOR_BYTES_MAX = _COVERED - _CURSOR_AT
"""Most bytes of a cursor in JSON: the rest of a header."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a source, in its own terms, from which an import can go on.

    Attributes:
        value: the position, as the source gave it; values of JSON.
        count: samples of the source before it.
    """

    value: Mapping[str, Any]
    count: int

    @property
    def json(self) -> bytes:
        """The value in JSON, in ASCII."""
        return json.dumps(self.value, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The end of the first pass of an import, all samples of which the second pass packs again.

    Attributes:
        step_count: number of its steps; those that follow are of the second pass.
        sample_count: its samples, which are all samples of the import.
        sample_bytes: sum of their lengths.
    """

    step_count: int
    sample_count: int
    sample_bytes: int

    @property
    def tag(self) -> tuple[int, bytes]:
        """The tagged value of a record that says this."""
        return TAG_FIRST_PASS, _FIRST_PASS.pack(*astuple(self))


def find_first_pass(tags: Iterable[tuple[int, bytes]]) -> FirstPass | None:
    """Return what a record's tagged values say of its first pass; None before the second one."""
    value = dict(tags).get(TAG_FIRST_PASS, b"")
    return FirstPass(*_FIRST_PASS.unpack(value)) if len(value) == FIRST_PASS_BYTES else None


@dataclass(frozen=True, slots=True)
class Term:
    """The time in which one coordinator has an import by workers.

    Attributes:
        value: random bytes, drawn when the coordinator began the import or took it over.
        expiry_ms: time after the coordinator has last found its term in the record for which a
            granted write may still take effect, in milliseconds; 0 if it ends with the processes.
    """

    value: bytes
    expiry_ms: int

    @classmethod
    def draw(cls, expiry_ms: int) -> Term:
        """Return a new term."""
        return cls(secrets.token_bytes(_TERM_VALUE_BYTES), expiry_ms)

    @property
    def tag(self) -> tuple[int, bytes]:
        """The tagged value of a record that says this."""
        return TAG_TERM, self.value + _EXPIRY.pack(self.expiry_ms)


def find_term(tags: Iterable[tuple[int, bytes]]) -> Term | None:
    """Return the term in a record's tagged values; None of an import without workers."""
    value = dict(tags).get(TAG_TERM)
    if value is None:
        return None
    return Term(value[:_TERM_VALUE_BYTES], *_EXPIRY.unpack(value[_TERM_VALUE_BYTES:]))


@dataclass(frozen=True, slots=True)
class StepHeader:
    """What the header of a step says besides the UUID of the dataset.

    Attributes:
        number: number of the step, from 0 on.
        first_chunk: chunks of the data space before those of this step.
        chunk_count: chunks of this step, which hold its samples.
        sample_count: samples of this step.
        sample_bytes: sum of their lengths.
        path_bytes: sum of the lengths of their paths.
        source_count: samples of the part of the source that this step and those of the part before
            it have used.
        window_count: windows of a shuffle that they have used.
        entries_bytes: length of the entries part of the directory segment.
        names_bytes: length of its names part.
        attributes_bytes: length of the attribute segment; 0 without one.
        attributes_head_bytes: length of its head; 0 without one.
        part: number of the part of the source that the samples are of.
        ends_part: True if they are the last ones of the part.
        cursor_count: samples of the part before its last cursor; 0 without one.
        cursor_json: the last cursor that the source gave, in JSON; empty without one.
    """

    number: int
    first_chunk: int
    chunk_count: int
    sample_count: int
    sample_bytes: int
    path_bytes: int
    source_count: int
    window_count: int
    entries_bytes: int
    names_bytes: int
    attributes_bytes: int
    attributes_head_bytes: int
    part: int = 0
    ends_part: bool = False
    cursor_count: int = 0
    cursor_json: bytes = b""

    @property
    def cursor(self) -> Cursor | None:
        """The last cursor that the source gave; None without one."""
        return Cursor(json.loads(self.cursor_json), self.cursor_count) if self.cursor_json else None

    @property
    def step_bytes(self) -> int:
        """Length of the step with its header, in bytes."""
        segments = self.entries_bytes + self.names_bytes + self.attributes_bytes
        return STEP_HEADER_BYTES + segments


def encode_step_header(header: StepHeader, dataset_uuid: UUID) -> bytes:
    """Return the header of a step, ``STEP_HEADER_BYTES`` long."""
    start = _START.pack(_MAGIC, _VERSION, STEP_HEADER_BYTES, dataset_uuid.bytes)
    fields = _FIELDS.pack(*astuple(header)[:-1], len(header.cursor_json))
    covered = (start + fields + header.cursor_json).ljust(_COVERED, b"\0")
    return covered + _CRC.pack(crc32c(covered))


def decode_step_header(data: bytes, dataset_uuid: UUID, number: int, where: str) -> StepHeader:
    """Return the header of a step.

    Args:
        data: its bytes.
        dataset_uuid: expected UUID of the dataset.
        number: expected number of the step.
        where: name of the journal, for errors.

    Raises:
        FormatError: it is malformed (ChecksumError), or that of another step.
    """
    what = f"{where}: read step {number}"
    (crc,) = _CRC.unpack_from(data, _COVERED)
    found = crc32c(data[:_COVERED])
    if found != crc:
        raise ChecksumError(f"{what}: expected CRC32C {crc:08x}, got {found:08x}")
    magic, version, header_bytes, uuid = _START.unpack_from(data)
    expected = _MAGIC, _VERSION, STEP_HEADER_BYTES, dataset_uuid.bytes
    if (magic, version, header_bytes, uuid) != expected:
        raise FormatError(
            f"{what}: expected {_MAGIC!r} version {_VERSION} of dataset {dataset_uuid}, got "
            f"{magic!r} version {version} of dataset {UUID(bytes=uuid)}"
        )
    *fields, cursor_bytes = _FIELDS.unpack_from(data, _START.size)
    fields.append(bytes(data[_CURSOR_AT : _CURSOR_AT + cursor_bytes]))
    header = StepHeader(*fields)
    lengths = (
        header.entries_bytes,
        header.names_bytes,
        header.attributes_bytes,
        header.attributes_head_bytes,
    )
    sound = (
        header.number == number
        and header.first_chunk + header.chunk_count <= ADDRESS_MAX
        and header.sample_count <= DATASET_SAMPLES_MAX
        and all(length % STEP_HEADER_BYTES == 0 and length <= ADDRESS_MAX for length in lengths)
        and min(header.entries_bytes, header.names_bytes) > 0
        and header.attributes_head_bytes <= header.attributes_bytes
        and cursor_bytes <= CURSOR_BYTES_MAX
        and header.cursor_count <= header.source_count
        and header.part <= PART_MAX
        and header.ends_part in (0, 1)
    )
    if not sound:
        raise FormatError(f"{what}: expected lengths and counts of a step, got {header}")
    return replace(header, ends_part=bool(header.ends_part))
