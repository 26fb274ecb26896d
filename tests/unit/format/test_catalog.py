from __future__ import annotations

import struct
from dataclasses import replace
from uuid import UUID

import pytest

from dlfs._native.checksums import crc32c
from dlfs.errors import ChecksumError, FormatError, LimitError, TruncatedError, UsageError
from dlfs.format.catalog import (
    AttributeExtent,
    Catalog,
    DatasetRecord,
    check_catalog,
    decode_catalog,
    encode_catalog,
)
from dlfs.format.geometry import ChunkRun
from dlfs.format.superblock import Superblock

WHERE = "disk0 at byte 1048576"
SECOND = 104 + 3 * 16 + 24 + 8 + 64  # offset of the second record


def signed(superblock: Superblock, raw: bytes) -> Superblock:
    """The superblock that would name these bytes as its catalog."""
    return replace(superblock, catalog_bytes=len(raw), catalog_crc32c=crc32c(raw))


def patched(catalog: Catalog, form: str, offset: int, *values: object) -> bytes:
    raw = bytearray(encode_catalog(catalog))
    struct.pack_into("<" + form, raw, offset, *values)
    return bytes(raw)


def refused(superblock: Superblock, raw: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        decode_catalog(raw, signed(superblock, raw), WHERE)
    assert type(caught.value) is FormatError
    assert str(caught.value).startswith(WHERE)


def test_it_comes_back(catalog: Catalog, superblock: Superblock) -> None:
    raw = encode_catalog(catalog)
    assert decode_catalog(raw, superblock, WHERE) == catalog
    assert decode_catalog(memoryview(raw + bytes(100)), superblock, WHERE) == catalog
    assert catalog.free_chunks == 1 + 2 + 116
    assert [d.data_chunks for d in catalog.datasets] == [3, 0]
    assert [d.directory_chunks for d in catalog.datasets] == [2, 1]


def test_fields_lie_where_the_specification_says(catalog: Catalog) -> None:
    raw = encode_catalog(catalog)
    assert struct.unpack_from("<8sII16sQQIIQ", raw) == (
        b"DLFSCAT1", 64, 0, UUID(int=1).bytes, 4, len(raw), 2, 3, 0,
    )  # fmt: skip
    assert struct.unpack_from("<II16s7QHHIIIQ", raw, 64) == (
        SECOND - 64, 1, UUID(int=100).bytes, 1_700_000_000_000_000_000, 5, 999, 7, 49152,
        20480, 4096, 1, 6, 24, 2, 1, 0,
    )  # fmt: skip
    assert struct.unpack_from("<6Q", raw, 168) == (1, 2, 9, 1, 5, 2)
    assert raw[216:240] == struct.pack("<HHI8sHHI", 3, 0, 5, b"hello", 65535, 0, 0)
    assert raw[240:248] == b"digits\0\0"
    assert raw[-48:] == struct.pack("<6Q", 4, 1, 7, 2, 10, 116)


def test_an_empty_catalog(superblock: Superblock) -> None:
    catalog = Catalog(4, UUID(int=1), (), (ChunkRun(1, 125),))
    raw = encode_catalog(catalog)
    assert decode_catalog(raw, signed(superblock, raw), WHERE) == catalog


def test_too_few_bytes(catalog: Catalog, superblock: Superblock) -> None:
    raw = encode_catalog(catalog)
    with pytest.raises(TruncatedError, match=f"^{WHERE}: .*expected {len(raw)} bytes"):
        decode_catalog(raw[:-1], superblock, WHERE)


def test_every_flipped_bit_is_found(catalog: Catalog, superblock: Superblock) -> None:
    raw = bytearray(encode_catalog(catalog))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumError, match=WHERE):
            decode_catalog(raw, superblock, WHERE)
        raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("form", "offset", "value", "message"),
    [
        ("8s", 0, b"DLFSVOL1", "expected 'DLFSCAT1'"),
        ("I", 8, 72, "with 64 of"),
        ("16s", 16, bytes(16), "expected volume UUID"),
        ("Q", 32, 5, "expected generation 4, got 5"),
        ("Q", 40, 64, "of 64"),
        ("I", 48, 3, "a record of|a dataset record"),
        ("I", 48, 1, "expected the end|expected runs up to"),
        ("I", 48, 65537, "at most 65536 datasets"),
        ("I", 48, (1 << 32) - 1, "at most 65536 datasets"),
        ("I", 52, 2, "expected the end"),
        ("I", 52, (1 << 32) - 1, "expected runs up to"),
        ("I", 64, 0, "expected a record of"),
        ("I", 64, 1 << 31, "expected a record of"),
        ("I", 68, 0, "version"),
        ("I", 68, 3, "rising order"),
        ("I", 68, 2, "rising order"),
        ("Q", 88, 1 << 63, "creation time"),
        ("Q", 96, 1 << 63, "sample count"),
        ("Q", 96, 1281, "sample count"),
        ("Q", 104, 49153, "sample bytes"),
        ("Q", 120, 16384, "data bytes 49152, got 16384"),
        ("Q", 120, 1 << 60, "data bytes"),
        ("Q", 128, 0, "entries bytes"),
        ("Q", 128, 20481, "entries bytes past a block"),
        ("Q", 128, 65536, "directory chunks 5, got 2"),
        ("Q", 136, 4095, "names bytes"),
        ("Q", 136, 4097, "names bytes past a block"),
        ("H", 144, 2, "layout"),
        ("H", 146, 0, "names? .*got 0|1..255 bytes, got 0|a record of"),
        ("I", 148, 1 << 17, "a record of"),
        ("I", 152, (1 << 32) - 1, "a record of"),
        ("I", 156, 0, "a record of|attribute"),
        ("Q", 168, 2, "no owner at chunk 1"),
        ("Q", 168, 0, "two owners at chunk 0"),
        ("Q", 168, (1 << 64) - 1, "no owner at chunk 1"),
        ("Q", 176, 0, "data bytes"),
        ("Q", 176, (1 << 64) - 1, "data bytes"),
        ("I", 220, 1 << 30, "bytes, got the end"),
        ("I", 220, 17, "bytes, got the end"),
        ("4s", 240, b"a/b\0", "no slash"),
        ("4s", 240, b"a\0bc", "no NUL byte"),
    ],
)
def test_hostile_fields_with_a_right_checksum(
    catalog: Catalog, superblock: Superblock, form: str, offset: int, value: object, message: str
) -> None:
    refused(superblock, patched(catalog, form, offset, value), message)


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ((), "no owner at chunk 4"),
        (((4, 1), (7, 2), (10, 115)), "up to chunk 126"),
        (((4, 1), (7, 2), (10, 117)), "up to chunk 126"),
        (((4, 1), (7, 1), (8, 1), (10, 116)), "free runs in order with gaps"),
        (((7, 2), (4, 1), (10, 116)), "free runs in order with gaps"),
        (((4, 2), (7, 2), (10, 116)), "two owners at chunk 5"),
        (((4, 1), (7, 2), (10, 116), (126, 0)), "free runs in order|at least one chunk"),
        (((4, 1), (7, 2), (10, 116), (200, 0)), "at least one chunk"),
        (((4, 1), (7, 2), (10, (1 << 64) - 1)), "up to chunk 126"),
    ],
)
def test_every_chunk_has_one_owner(
    catalog: Catalog,
    superblock: Superblock,
    free: tuple[tuple[int, int], ...],
    message: str,
) -> None:
    wrong = replace(catalog, free=tuple(ChunkRun(*run) for run in free))
    with pytest.raises(UsageError, match=message):
        check_catalog(wrong, superblock)
    refused(superblock, encode_catalog(wrong), message)


SHARED_BY_TWO = (ChunkRun(9, 1), ChunkRun(1, 2))


def with_second_data(catalog: Catalog, *runs: ChunkRun) -> Catalog:
    """Return the catalog with these data runs in its second dataset."""
    first, second = catalog.datasets
    data_bytes = sum(run.chunk_count for run in runs) * 16384
    return replace(
        catalog, datasets=(first, replace(second, data_runs=runs, data_bytes=data_bytes))
    )


@pytest.mark.parametrize(
    "runs", [SHARED_BY_TWO, (ChunkRun(2, 1),), (ChunkRun(1, 1), ChunkRun(2, 1))]
)
def test_datasets_may_share_chunks_of_data(
    catalog: Catalog, superblock: Superblock, runs: tuple[ChunkRun, ...]
) -> None:
    sharing = with_second_data(catalog, *runs)
    assert sharing.data_runs == [ChunkRun(1, 2), ChunkRun(9, 1)]
    raw = encode_catalog(sharing)
    assert decode_catalog(raw, signed(superblock, raw), WHERE) == sharing


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((ChunkRun(1, 2), ChunkRun(2, 1)), "expected each chunk once, got chunk 2 twice"),
        ((ChunkRun(9, 1), ChunkRun(9, 1)), "expected each chunk once, got chunk 9 twice"),
        ((ChunkRun(2, 2),), "two owners at chunk 3"),
        ((ChunkRun(9, 2),), "two owners at chunk 10"),
        ((ChunkRun(2, 1), ChunkRun(5, 1)), "two owners at chunk 5"),
    ],
)
def test_only_data_of_different_datasets_may_share_chunks(
    catalog: Catalog, superblock: Superblock, runs: tuple[ChunkRun, ...], message: str
) -> None:
    raw = encode_catalog(with_second_data(catalog, *runs))
    refused(superblock, raw, message)


def test_a_header_cut_short(superblock: Superblock) -> None:
    raw = bytes(63)
    with pytest.raises(FormatError, match="64 bytes of header, got 63"):
        decode_catalog(raw, signed(superblock, raw), WHERE)


def test_counts_are_bounded_before_anything_is_made(superblock: Superblock) -> None:
    body = bytes(16 * 262_145)
    raw = struct.pack(
        "<8sII16sQQIIQ", b"DLFSCAT1", 64, 0, UUID(int=1).bytes, 4, 64 + len(body), 0, 262_145, 0
    )
    refused(superblock, raw + body, "262144 in all")


def changed(record: DatasetRecord, name: str, value: object) -> DatasetRecord:
    return replace(record, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("name", b"", UsageError),
        ("name", b"..", UsageError),
        ("version", 0, UsageError),
        ("version", 1 << 32, UsageError),
        ("layout", "sorted", UsageError),
        ("seed", 1 << 64, UsageError),
        ("created_ns", -1, UsageError),
        ("sample_count", -1, UsageError),
        ("entries_bytes", 0, UsageError),
        ("attributes", ((1, bytes(65536)),), LimitError),
    ],
)
def test_wrong_records_are_not_encoded(
    catalog: Catalog, name: str, value: object, kind: type[Exception]
) -> None:
    record = changed(catalog.datasets[0], name, value)
    with pytest.raises(kind, match="encode the dataset"):
        encode_catalog(replace(catalog, datasets=(record,)))


def test_datasets_out_of_order_are_not_encoded(catalog: Catalog) -> None:
    for datasets in (catalog.datasets[::-1], catalog.datasets[:1] * 2):
        with pytest.raises(UsageError, match="rising order"):
            encode_catalog(replace(catalog, datasets=datasets))


def test_too_many_are_not_encoded(catalog: Catalog) -> None:
    with pytest.raises(LimitError, match="65536 datasets"):
        encode_catalog(replace(catalog, datasets=catalog.datasets[:1] * 65537))
    with pytest.raises(LimitError, match="262144 runs"):
        encode_catalog(replace(catalog, free=(ChunkRun(0, 1),) * 262_145))


def test_too_many_bytes_are_not_encoded(catalog: Catalog) -> None:
    large = replace(catalog.datasets[0], attributes=((7, bytes(60_000)),))
    datasets = tuple(replace(large, version=version) for version in range(1, 300))
    with pytest.raises(LimitError, match="16777216 bytes"):
        encode_catalog(replace(catalog, datasets=datasets))


def test_runs_of_data_and_directory_count_towards_the_limit(catalog: Catalog) -> None:
    record = replace(
        catalog.datasets[0],
        data_runs=(ChunkRun(0, 1),) * 131_072,
        directory_runs=(ChunkRun(0, 1),) * 131_072,
    )
    encode_catalog(replace(catalog, datasets=(record,), free=()))
    with pytest.raises(LimitError, match="262144 runs of chunks, got 1 and 262145"):
        encode_catalog(replace(catalog, datasets=(record,), free=(ChunkRun(0, 1),)))


def test_errors_name_the_byte_and_the_size(catalog: Catalog, superblock: Superblock) -> None:
    length = len(encode_catalog(catalog))
    at = length - 48 + 2 * 16
    refused(
        superblock,
        patched(catalog, "I", 52, 2),
        f"at byte {at} of it: expected the end, got {length} bytes$",
    )
    refused(
        superblock,
        patched(catalog, "I", 64, 1 << 31),
        f"at byte 64 of it: expected a record of {SECOND - 64 - 2} bytes, got {1 << 31}$",
    )


# ---- the attribute segment -----------------------------------------------------------------------

EXTENT_AT = (
    104 + 64 + 3 * 16 + 8
)  # offset of the extent in the catalog: the first attribute's value


def with_extents(catalog: Catalog, *extents: AttributeExtent) -> Catalog:
    """The catalog, its first dataset with these extents before an attribute of another tag."""
    attributes = (*(extent.encode() for extent in extents), (3, b"hello"))
    return replace(
        catalog, datasets=(replace(catalog.datasets[0], attributes=attributes), catalog.datasets[1])
    )


@pytest.mark.parametrize(
    ("extent", "samples", "segment"),
    [
        (AttributeExtent(32768, 16384, 4096), ((1, 2),), ((9, 1),)),
        (AttributeExtent(32768, 4096, 4096), ((1, 2),), ((9, 1),)),
        (AttributeExtent(16384, 20480, 8192), ((1, 1),), ((2, 1), (9, 1))),
        (AttributeExtent(0, 49152, 49152), (), ((1, 2), (9, 1))),
    ],
)
def test_an_attribute_segment_has_the_last_chunks_of_the_data(
    catalog: Catalog,
    superblock: Superblock,
    extent: AttributeExtent,
    samples: tuple[tuple[int, int], ...],
    segment: tuple[tuple[int, int], ...],
) -> None:
    wanted = with_extents(catalog, extent)
    check_catalog(wanted, superblock)
    raw = encode_catalog(wanted)
    got = decode_catalog(raw, signed(superblock, raw), WHERE)
    assert got == wanted
    assert got.datasets[0].attribute_extent == extent
    assert got.datasets[0].split_data_runs(16384) == (
        tuple(ChunkRun(*run) for run in samples),
        tuple(ChunkRun(*run) for run in segment),
    )


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        (AttributeExtent(32768, 4097, 4096), "of whole blocks with its head"),
        (AttributeExtent(32768, 8192, 4097), "of whole blocks with its head"),
        (AttributeExtent(32768, 4096, 0), "of whole blocks with its head"),
        (AttributeExtent(32768, 0, 0), "of whole blocks with its head"),
        (AttributeExtent(32768, 4096, 8192), "of whole blocks with its head"),
        (AttributeExtent(32768, 20480, 4096), "segment within 49152 bytes"),
        (AttributeExtent(49152, 4096, 4096), "segment within 49152 bytes"),
    ],
)
def test_an_attribute_segment_that_cannot_be(
    catalog: Catalog, superblock: Superblock, extent: AttributeExtent, message: str
) -> None:
    with pytest.raises(UsageError, match=f"encode the dataset 'digits': .*{message}"):
        encode_catalog(with_extents(catalog, extent))
    right = with_extents(catalog, AttributeExtent(32768, 4096, 4096))
    refused(superblock, patched(right, "24s", EXTENT_AT, extent.encode()[1]), message)


@pytest.mark.parametrize(
    ("extent", "expected"),
    [
        (AttributeExtent(16384, 4096, 4096), 32768),
        (AttributeExtent(32768 + 4096, 4096, 4096), 32768),
        (AttributeExtent(0, 16384, 4096), 32768),
        (AttributeExtent(24576, 20480, 4096), 16384),
    ],
)
def test_an_attribute_segment_in_other_chunks(
    catalog: Catalog, superblock: Superblock, extent: AttributeExtent, expected: int
) -> None:
    wrong = with_extents(catalog, extent)
    message = f"expected attribute address {expected}, got {extent.address}"
    with pytest.raises(UsageError, match=message):
        check_catalog(wrong, superblock)
    refused(superblock, encode_catalog(wrong), message)


def test_one_attribute_segment_at_most(catalog: Catalog) -> None:
    extent = AttributeExtent(32768, 4096, 4096)
    with pytest.raises(UsageError, match=r"one attribute segment in 24 bytes, got \[24, 24\]"):
        encode_catalog(with_extents(catalog, extent, extent))
    tag, value = extent.encode()
    short = replace(catalog.datasets[0], attributes=((tag, value[:-1]),))
    with pytest.raises(UsageError, match=r"one attribute segment in 24 bytes, got \[23\]"):
        encode_catalog(replace(catalog, datasets=(short,)))
