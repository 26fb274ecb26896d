"""Passes a generation of a volume to clients, as a file in memory with superblock and catalog.

The file has the bytes as on media. So a catalog of any length travels as one descriptor, and
clients read it with the decoder for media, which checks everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dlfs._native.checksums import crc32c
from dlfs._native.handle import Descriptor
from dlfs.errors import FormatError
from dlfs.format.catalog import Catalog, decode_catalog, encode_catalog
from dlfs.format.constants import CATALOG_BYTES_MAX, SUPERBLOCK_BYTES
from dlfs.format.superblock import Superblock, decode_superblock, encode_superblock

_BYTES_MAX = SUPERBLOCK_BYTES + CATALOG_BYTES_MAX


@contextmanager
def generation_file(superblock: Superblock, catalog: Catalog) -> Iterator[int]:
    """Write a generation to a memfd; yield its descriptor, and close it at the end."""
    raw = encode_catalog(catalog)
    adapted = replace(superblock, catalog_bytes=len(raw), catalog_crc32c=crc32c(raw))
    with Descriptor() as file:
        descriptor = file.fill(os.memfd_create, "dlfs-generation", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as out:
            out.write(encode_superblock(adapted) + raw)
        yield descriptor


def read_generation(descriptor: int, where: str) -> tuple[Superblock, Catalog]:
    """Read a generation from a file that ``generation_file`` wrote.

    Args:
        descriptor: descriptor of the file; the caller closes it.
        where: origin of the file, for error messages.

    Raises:
        FormatError: the file does not hold a generation.
    """
    size = os.fstat(descriptor).st_size
    if not SUPERBLOCK_BYTES <= size <= _BYTES_MAX:
        raise FormatError(
            f"read a generation from {where}: expected {SUPERBLOCK_BYTES}..{_BYTES_MAX} bytes, "
            f"got {size}"
        )
    data = os.pread(descriptor, size, 0)
    superblock = decode_superblock(data[:SUPERBLOCK_BYTES], where)
    return superblock, decode_catalog(data[SUPERBLOCK_BYTES:], superblock, where)
