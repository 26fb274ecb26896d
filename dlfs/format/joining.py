"""The joining record: written to a device while it is filled to replace a lost member.

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
"""The record fits in a device's smallest block, which is written completely or not at all."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class JoiningRecord:
    """The volume and the member that a device is being filled for."""

    volume_uuid: UUID
    member_uuid: UUID
    member_number: int

    def encode(self) -> bytes:
        """Encode the record in ``JOINING_BYTES`` bytes."""
        block = bytearray(JOINING_BYTES)
        _HEAD.pack_into(
            block, 0, JOINING_MAGIC, _VERSION, self.member_number, self.volume_uuid.bytes,
            self.member_uuid.bytes,
        )  # fmt: skip
        struct.pack_into("<I", block, _CRC_OFFSET, crc32c(bytes(block[:_CRC_OFFSET])))
        return bytes(block)

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Decode a record; return None if the bytes are no joining record."""
        if len(content) < JOINING_BYTES:
            return None
        magic, version, number, volume, member = _HEAD.unpack_from(content)
        (recorded,) = struct.unpack_from("<I", content, _CRC_OFFSET)
        known = magic == JOINING_MAGIC and version == _VERSION and number < MEMBERS_MAX
        if not known or recorded != crc32c(content[:_CRC_OFFSET]):
            return None
        return cls(UUID(bytes=volume), UUID(bytes=member), number)
