"""Magics, sizes, offsets and limits of the on-media format, which FORMAT.md explains."""

from __future__ import annotations

from dlfs.base.units import KIB, MIB

VERSION_MAJOR = 1
VERSION_MINOR = 0
DRAFT = 8
"""State of development of the format until the first release; every change of the format adds 1."""

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
LOCATION_RECORD_OFFSET_BYTES = 256 * KIB
LOCATION_RECORD_BYTES_MAX = 64 * KIB
LOCATION_RECORD_MAGIC = b"DLFSLOCN"
DATA_OFFSET_BYTES_MIN = 1 * MIB

CHUNK_BYTES_DEFAULT = 256 * KIB
CHUNK_BYTES_MIN = 4 * KIB
CHUNK_BYTES_MAX = 64 * MIB
BLOCK_BYTES_DEFAULT = 4 * KIB
BLOCK_BYTES_MIN = 512
BLOCK_BYTES_MAX = 64 * KIB

MEMBERS_MAX = 64
GROUPS_MAX = 20
"""Most groups of members: as many as the superblock's table has room for."""
CHUNK_END_MAX = 1 << 63
"""Bound of the numbers of chunks."""
REPLICAS_MAX = 4
"""Most copies of a chunk."""
CHUNKS_MIN = 4
"""Chunks of the smallest volume: two catalogs (old and new), a directory and its data."""
LABEL_BYTES_MAX = 64
REMOVED_BUCKETS = 512
"""Buckets of the superblock's table of removed versions: a name's CRC32C modulo this number."""
GENERATION_MAX = (1 << 63) - 1
MEMBER_BYTES_MAX = 1 << 62
TIME_NS_MAX = (1 << 63) - 1

CATALOG_HEADER_BYTES = 64
CATALOG_BYTES_MAX = 16 * MIB
CATALOG_EXTENTS_MAX = 16
CATALOG_DATASETS_MAX = 65_536
CATALOG_RUNS_MAX = 262_144
"""Most runs of chunks in one catalog, of all datasets and the free space together."""
DATASET_NAME_BYTES_MAX = 255
NEW_DATASET_NAME_BYTES_MAX = 244
"""Longest name of a new dataset, in bytes: with ``@`` and a ten-digit version it fits a file name.
"""
TAGS_BYTES_MAX = 64 * KIB - 8
"""Longest tagged values of a dataset record, in bytes."""
DATASET_SAMPLES_MAX = 1 << 48
DATASET_VERSION_MAX = (1 << 32) - 1
TAG_SOURCE = 1
"""Tag of an unfinished record that describes the source and the options of its import."""
SOURCE_BYTES_MAX = 16 * KIB
TAG_BAD_RECORDS = 2
"""Tag of a sealed record that reports the records that imports left out."""
BAD_RECORDS_BYTES_MAX = 32 * KIB
TAG_FIRST_PASS = 3
"""Tag of an unfinished record whose second pass has begun, with what its first pass has."""
FIRST_PASS_BYTES = 24
TAG_TERM = 4
"""Tag of an unfinished record that workers import, with the term of their coordinator."""
TERM_BYTES = 24
PART_MAX = (1 << 31) - 1
"""Highest number of a part of a source."""

ATTRIBUTE_MAGIC = b"DLFSATT1"
ATTRIBUTE_VERSION = 1
ATTRIBUTE_BLOCK_BYTES = 4096
ATTRIBUTE_COLUMNS_MAX = 1024
COLUMN_NAME_BYTES_MAX = 255
DICTIONARY_VALUES_MAX = 65_536
"""Most different strings of a column with a dictionary; with more, every string is stored."""

LOCATION_BYTES = 16
SAMPLE_BYTES_MAX = (1 << 40) - 1
ADDRESS_MAX = (1 << 56) - 1
DIRECTORY_BLOCK_BYTES = 4096

PATH_BYTES_MAX = 4095
COMPONENT_BYTES_MAX = 255

RESERVED_PREFIX = "dlfs:"
"""Prefix of the names that users cannot give to columns."""
