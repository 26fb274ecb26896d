"""A generation of a volume as a file in memory: superblock and catalog as they stand on media.

So the service hands over the whole catalog, however long, by a descriptor, and clients read it with
the decoder that reads media, which believes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dlfs._native.checksums import crc32c
from dlfs.errors import FormatError
from dlfs.format.catalog import Catalog, decode_catalog, encode_catalog
from dlfs.format.constants import CATALOG_BYTES_MAX, SUPERBLOCK_BYTES
from dlfs.format.superblock import Superblock, decode_superblock, encode_superblock

_BYTES_MAX = SUPERBLOCK_BYTES + CATALOG_BYTES_MAX


@contextmanager
def generation_file(superblock: Superblock, catalog: Catalog) -> Iterator[int]:
    """Write a generation into a file without a name; its descriptor, closed at the end."""
    raw = encode_catalog(catalog)
    ours = replace(superblock, catalog_bytes=len(raw), catalog_crc32c=crc32c(raw))
    descriptor = os.memfd_create("dlfs-generation", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as out:
            out.write(encode_superblock(ours) + raw)
        yield descriptor
    finally:
        os.close(descriptor)


def read_generation(descriptor: int, where: str) -> tuple[Superblock, Catalog]:
    """Read what ``generation_file`` wrote.

    Args:
        descriptor: of the file; it stays the caller's.
        where: it came from, for errors.

    Raises:
        FormatError: it is no generation.
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
