"""The location record: the URIs of a volume's members, as the host that grew the volume knew them.

FORMAT.md, section 3.4. Readers that were given some members find the others by it. It is a hint:
only a superblock makes a device a member.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from uuid import UUID

from dlfs._native.checksums import crc32c
from dlfs.errors import LimitError
from dlfs.format.constants import LOCATION_RECORD_BYTES_MAX, LOCATION_RECORD_MAGIC, MEMBERS_MAX

_HEAD = struct.Struct("<8sII16sQII")
_MEMBER = struct.Struct("<16sH")
_CRC = struct.Struct("<I")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LocationRecord:
    """URIs of the members of a volume, by their UUIDs, at one generation."""

    volume_uuid: UUID
    generation: int
    uris: Mapping[UUID, str]

    def encode(self) -> bytes:
        """Encode the record.

        Raises:
            LimitError: the URIs are too long.
        """
        entries = b""
        for uuid, uri in self.uris.items():
            text = uri.encode(errors="surrogateescape")
            entries += _MEMBER.pack(uuid.bytes, len(text)) + text
        length = _HEAD.size + len(entries) + _CRC.size
        if length > LOCATION_RECORD_BYTES_MAX:
            raise LimitError(
                f"record the URIs of {len(self.uris)} members: expected at most "
                f"{LOCATION_RECORD_BYTES_MAX} bytes, got {length}"
            )
        head = _HEAD.pack(
            LOCATION_RECORD_MAGIC, _VERSION, length, self.volume_uuid.bytes, self.generation,
            len(self.uris), 0,
        )  # fmt: skip
        return head + entries + _CRC.pack(crc32c(head + entries))

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Decode a record; return None if the bytes are no location record."""
        if len(content) < _HEAD.size:
            return None
        magic, version, length, volume, generation, count, _ = _HEAD.unpack_from(content)
        known = magic == LOCATION_RECORD_MAGIC and version == _VERSION and count <= MEMBERS_MAX
        if not known or not _HEAD.size + _CRC.size <= length <= len(content):
            return None
        end = length - _CRC.size
        if _CRC.unpack_from(content, end)[0] != crc32c(content[:end]):
            return None
        uris: dict[UUID, str] = {}
        at = _HEAD.size
        for _ in range(count):
            if at + _MEMBER.size > end:
                return None
            uuid, uri_bytes = _MEMBER.unpack_from(content, at)
            at += _MEMBER.size + uri_bytes
            if at > end:
                return None
            uris[UUID(bytes=uuid)] = content[at - uri_bytes : at].decode(errors="surrogateescape")
        return cls(UUID(bytes=volume), generation, uris)
