"""Magics, sizes, offsets and limits of the on-media format; FORMAT.md explains them."""

from __future__ import annotations

from dlfs.units import KIB, MIB

VERSION_MAJOR = 1
VERSION_MINOR = 3
"""The newest that this code knows. What does not need it is written as an older minor version."""
VERSION_MINOR_REPLICAS = 1
VERSION_MINOR_ATTRIBUTES = 2
VERSION_MINOR_REMOVED = 3
INCOMPAT_REPLICAS = 1 << 0
"""Every chunk is stored more than once; since 1.1."""
INCOMPAT_KNOWN = INCOMPAT_REPLICAS
"""Feature bits without which a volume cannot be read, that this code knows."""
RO_COMPAT_ATTRIBUTES = 1 << 0
"""A dataset has an attribute segment, which a repair must keep; since 1.2."""
RO_COMPAT_REMOVED = 1 << 1
"""The superblock has version numbers of removed datasets, which a writer must keep; since 1.3."""
RO_COMPAT_KNOWN = RO_COMPAT_ATTRIBUTES | RO_COMPAT_REMOVED
"""Feature bits without which a volume can be read but not written, that this code knows."""

SUPERBLOCK_MAGIC = b"DLFSVOL1"
CATALOG_MAGIC = b"DLFSCAT1"

SUPERBLOCK_BYTES = 4096
SUPERBLOCK_A_OFFSET_BYTES = 0
SUPERBLOCK_B_OFFSET_BYTES = 64 * KIB
LEASE_OFFSET_BYTES = 128 * KIB
LEASE_BYTES = 4096
JOINING_OFFSET_BYTES = 192 * KIB
JOINING_BYTES = 4096
JOINING_MAGIC = b"DLFSJOIN"
DATA_OFFSET_BYTES_MIN = 1 * MIB

CHUNK_BYTES_DEFAULT = 256 * KIB
CHUNK_BYTES_MIN = 4 * KIB
CHUNK_BYTES_MAX = 64 * MIB
BLOCK_BYTES_DEFAULT = 4 * KIB
BLOCK_BYTES_MIN = 512
BLOCK_BYTES_MAX = 64 * KIB

MEMBERS_MAX = 64
REPLICAS_MAX = 4
"""Copies of a chunk."""
CHUNKS_MIN = 4
"""Chunks of the smallest volume: two catalogs (old and new), a directory and its data."""
LABEL_BYTES_MAX = 64
REMOVED_SLOTS = 512
"""Slots of the superblock's table of removed versions; names share them by their CRC32C."""
GENERATION_MAX = (1 << 63) - 1
MEMBER_BYTES_MAX = 1 << 62
TIME_NS_MAX = (1 << 63) - 1

CATALOG_HEADER_BYTES = 64
CATALOG_BYTES_MAX = 16 * MIB
CATALOG_EXTENTS_MAX = 16
CATALOG_DATASETS_MAX = 65_536
CATALOG_RUNS_MAX = 262_144
"""Chunk runs in one catalog, of all datasets and of the free space together."""
DATASET_RECORD_BYTES = 104
"""Fixed part of a dataset record; runs, name and attributes follow."""
DATASET_NAME_BYTES_MAX = 255
NEW_DATASET_NAME_BYTES_MAX = 244
"""Length of a new name: with ``@`` and a version of ten digits it is a file name still."""
DATASET_ATTRIBUTES_BYTES_MAX = 64 * KIB
DATASET_VERSION_MAX = (1 << 32) - 1
TAG_ATTRIBUTES = 1
"""Tag of a dataset record: where the attribute segment lies."""

ATTRIBUTE_MAGIC = b"DLFSATT1"
ATTRIBUTE_VERSION = 1
ATTRIBUTE_BLOCK_BYTES = 4096
ATTRIBUTE_COLUMNS_MAX = 1024
COLUMN_NAME_BYTES_MAX = 255
DICTIONARY_VALUES_MAX = 65_536
"""Different strings that a column may refer to by indices; with more they lie one by one."""

LOCATION_BYTES = 16
SAMPLE_BYTES_MAX = (1 << 40) - 1
ADDRESS_MAX = (1 << 56) - 1
DIRECTORY_BLOCK_BYTES = 4096

PATH_BYTES_MAX = 4095
COMPONENT_BYTES_MAX = 255
