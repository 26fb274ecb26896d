"""The joining record: what a device says while it is filled to take a lost member's place.

FORMAT.md, section 3.3. The record lets a repair that was interrupted be taken up again on a device
that is no longer empty, and nothing else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self
from uuid import UUID

from dlfs._native.checksums import crc32c
from dlfs.format.constants import JOINING_BYTES, JOINING_MAGIC, MEMBERS_MAX

_HEAD = struct.Struct("<8sII16s16s")
_CRC_OFFSET = 512 - 4
"""All of it lies in the smallest block of a device, which is written whole or not at all."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class JoiningRecord:
    """Which member of which volume a device is to be."""

    volume_uuid: UUID
    member_uuid: UUID
    member_number: int

    def encode(self) -> bytes:
        """The record as it lies on media, ``JOINING_BYTES`` long."""
        block = bytearray(JOINING_BYTES)
        _HEAD.pack_into(
            block, 0, JOINING_MAGIC, _VERSION, self.member_number, self.volume_uuid.bytes,
            self.member_uuid.bytes,
        )  # fmt: skip
        struct.pack_into("<I", block, _CRC_OFFSET, crc32c(bytes(block[:_CRC_OFFSET])))
        return bytes(block)

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Read a record; None when there is none, or nothing that could be one."""
        if len(content) < JOINING_BYTES:
            return None
        magic, version, number, volume, member = _HEAD.unpack_from(content)
        (recorded,) = struct.unpack_from("<I", content, _CRC_OFFSET)
        known = magic == JOINING_MAGIC and version == _VERSION and number < MEMBERS_MAX
        if not known or recorded != crc32c(content[:_CRC_OFFSET]):
            return None
        return cls(UUID(bytes=volume), UUID(bytes=member), number)
