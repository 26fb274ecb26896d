from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any
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
from dlfs.format.constants import TAG_SOURCE, TAG_TERM
from dlfs.format.geometry import ChunkRun
from dlfs.format.run_arrays import to_array, to_runs
from dlfs.format.superblock import Superblock
from tests.unit.format.conftest import with_records

WHERE = "disk0 at byte 1048576"
FIRST, SECOND = 64, 64 + 168  # offsets of the rows
RUNS = SECOND + 168
TEXT = RUNS + 16 * (3 + 1 + 3)


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
    assert sum(run.chunk_count for run in catalog.free) == 1 + 2 + 116
    assert catalog.sums(catalog.runs[:, 1])[:, :2].tolist() == [[3, 2], [0, 1]]


def test_fields_lie_where_the_specification_says(catalog: Catalog) -> None:
    raw = encode_catalog(catalog)
    assert struct.unpack_from("<8sII16sQQIIII", raw) == (
        b"DLFSCAT1", 64, 0, UUID(int=1).bytes, 4, len(raw), 2, 3, 4, 36,
    )  # fmt: skip
    assert struct.unpack_from("<16sIHH10Q3IHHQ", raw, FIRST) == (
        UUID(int=100).bytes, 1, 0, 1, 1_700_000_000_000_000_000, 5, 999, 7, 49152, 20480, 4096,
        0, 0, 0, 2, 1, 0, 6, 24, 0,
    )  # fmt: skip
    assert struct.unpack_from("<8Q", raw, RUNS) == (1, 2, 9, 1, 5, 2, 3, 1)
    assert struct.unpack_from("<6Q", raw, RUNS + 64) == (4, 1, 7, 2, 10, 116)
    tags = struct.pack("<HHI8sHHI", 40, 0, 5, b"hello", 65535, 0, 0)
    assert raw[TEXT:] == b"digits" + tags + b"digits"


def test_an_empty_catalog(superblock: Superblock) -> None:
    catalog = Catalog.of(4, UUID(int=1), (), (ChunkRun(1, 125),))
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
        ("I", 48, 3, "bytes for 3 datasets"),
        ("I", 48, 1, "bytes for 1 datasets"),
        ("I", 48, 65537, "at most 65536 datasets"),
        ("I", 48, (1 << 32) - 1, "at most 65536 datasets"),
        ("I", 52, 2, "4 and 2 runs"),
        ("I", 52, (1 << 32) - 1, "262144 runs"),
        ("I", 56, 5, "5 and 3 runs"),
        ("I", 60, 0, "0 bytes of names"),
        ("I", FIRST + 16, 0, r"version in 1\.\.4294967295, got 0"),
        ("I", FIRST + 16, 3, "rising order"),
        ("I", FIRST + 16, 2, "rising order"),
        ("H", FIRST + 20, 2, r"state in 0\.\.1, got 2"),
        ("H", FIRST + 20, 1, r"unfinished dataset 'digits': expected version in 0\.\.0, got 1"),
        ("H", FIRST + 22, 2, r"layout in 0\.\.1, got 2"),
        ("Q", FIRST + 24, 1 << 63, "creation time"),
        ("Q", FIRST + 32, 1 << 63, "sample count"),
        ("Q", FIRST + 32, 1281, r"sample count in 0\.\.1280, got 1281"),
        ("Q", FIRST + 40, 49153, r"sample bytes in 0\.\.49152, got 49153"),
        ("Q", FIRST + 56, 16384, "data bytes 49152, got 16384"),
        ("Q", FIRST + 56, 1 << 60, "data bytes"),
        ("Q", FIRST + 64, 0, "entries bytes"),
        ("Q", FIRST + 64, 20481, "entries bytes past a block"),
        ("Q", FIRST + 64, 65536, "directory chunks 5, got 2"),
        ("Q", FIRST + 72, 4095, "names bytes"),
        ("Q", FIRST + 72, 4097, "names bytes past a block"),
        ("I", FIRST + 104, (1 << 32) - 1, "runs of datasets, got 4"),
        ("I", FIRST + 108, 0, "expected 3 runs of datasets, got 4"),
        ("I", FIRST + 112, 1, "expected 5 runs of datasets, got 4"),
        ("H", FIRST + 116, 0, "bytes of names and tagged values, got 36"),
        ("H", FIRST + 118, 1 << 15, "bytes of names and tagged values, got 36"),
        ("Q", FIRST + 120, 1, r"journal bytes in 0\.\.0, got 1"),
        ("Q", RUNS, 2, "no owner at chunk 1"),
        ("Q", RUNS, 0, "two owners at chunk 0"),
        ("Q", RUNS, (1 << 64) - 1, "the data of dataset 'digits' version 1: expected chunks below"),
        ("Q", RUNS + 8, 0, "data bytes|at least one chunk"),
        ("Q", RUNS + 8, (1 << 64) - 1, "data bytes"),
        ("I", TEXT + 10, 1 << 30, "bytes at byte 8, got the end"),
        ("I", TEXT + 10, 17, "bytes at byte 8, got the end"),
        ("4s", TEXT, b"a/bc", "no slash"),
        ("4s", TEXT, b"a\0bc", "no NUL byte"),
        ("6s", TEXT, b"digit\0", "no NUL byte"),
        ("6s", TEXT, b"e", "rising order|no NUL byte"),
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
        (((4, 1), (7, 2), (10, 116), (127, 1)), "no owner at chunk 126"),
        (((4, 1), (7, 2), (10, 116), (200, 0)), "at least one chunk"),
        (((4, 1), (7, 2), (10, (1 << 64) - 1)), "expected chunks below"),
    ],
)
def test_every_chunk_has_one_owner(
    catalog: Catalog,
    superblock: Superblock,
    free: tuple[tuple[int, int], ...],
    message: str,
) -> None:
    runs = tuple(ChunkRun(*run) for run in free)
    wrong = Catalog.of(4, UUID(int=1), tuple(catalog.datasets), runs)
    with pytest.raises(UsageError, match=message):
        check_catalog(wrong, superblock)
    refused(superblock, encode_catalog(wrong), message)


SHARED_BY_TWO = (ChunkRun(9, 1), ChunkRun(1, 2))


def with_second_data(catalog: Catalog, *runs: ChunkRun) -> Catalog:
    """Return the catalog with these data runs in its second dataset."""
    first, second = catalog.datasets
    data_bytes = sum(run.chunk_count for run in runs) * 16384
    return with_records(catalog, first, replace(second, data_runs=runs, data_bytes=data_bytes))


@pytest.mark.parametrize(
    "runs", [SHARED_BY_TWO, (ChunkRun(2, 1),), (ChunkRun(1, 1), ChunkRun(2, 1))]
)
def test_datasets_may_share_chunks_of_data(
    catalog: Catalog, superblock: Superblock, runs: tuple[ChunkRun, ...]
) -> None:
    sharing = with_second_data(catalog, *runs)
    assert to_runs(sharing.used_runs) == (ChunkRun(1, 3), ChunkRun(5, 2), ChunkRun(9, 1))
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
        "<8sII16sQQIIII", b"DLFSCAT1", 64, 0, UUID(int=1).bytes, 4, 64 + len(body), 0, 262_145, 0, 0
    )
    refused(superblock, raw + body, "262144 runs of chunks, got 0 and 262145")


def changed(record: DatasetRecord, name: str, value: object) -> DatasetRecord:
    return replace(record, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("name", bytes(1 << 16), UsageError),
        ("version", 1 << 32, UsageError),
        ("layout", "sorted", UsageError),
        ("state", "half", UsageError),
        ("seed", 1 << 64, UsageError),
        ("created_ns", -1, UsageError),
        ("sample_count", -1, UsageError),
        ("tags", ((1, bytes(65536)),), LimitError),
    ],
)
def test_wrong_records_are_not_encoded(
    catalog: Catalog, name: str, value: object, kind: type[Exception]
) -> None:
    record = changed(catalog.datasets[0], name, value)
    with pytest.raises(kind, match="encode the dataset"):
        with_records(catalog, record)


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", b""), ("name", b".."), ("name", bytes(256)), ("version", 0), ("entries_bytes", 0)],
)
def test_wrong_records_are_not_committed(
    catalog: Catalog, superblock: Superblock, name: str, value: object
) -> None:
    record = changed(catalog.datasets[1], name, value)
    with pytest.raises(UsageError, match=f"expected .*{name.split('_')[0]}"):
        check_catalog(with_records(catalog, catalog.datasets[0], record), superblock)


def test_datasets_out_of_order_are_not_committed(catalog: Catalog, superblock: Superblock) -> None:
    first, second = catalog.datasets
    for records in ((second, first), (first, first)):
        with pytest.raises(UsageError, match="rising order"):
            check_catalog(with_records(catalog, *records), superblock)


def test_too_many_are_not_encoded(catalog: Catalog) -> None:
    with pytest.raises(LimitError, match="65536 datasets"):
        encode_catalog(with_records(catalog, *[catalog.datasets[0]] * 65537))
    with pytest.raises(LimitError, match="262144 runs"):
        encode_catalog(catalog.with_free(to_array([ChunkRun(0, 1)] * 262_145)))


def test_too_many_bytes_are_not_encoded(catalog: Catalog) -> None:
    large = replace(catalog.datasets[0], tags=((7, bytes(60_000)),))
    datasets = tuple(replace(large, version=version) for version in range(1, 300))
    with pytest.raises(LimitError, match="16777216 bytes"):
        encode_catalog(with_records(catalog, *datasets))


def test_runs_of_data_and_directory_count_towards_the_limit(catalog: Catalog) -> None:
    record = replace(
        catalog.datasets[0],
        data_runs=(ChunkRun(0, 1),) * 131_072,
        directory_runs=(ChunkRun(0, 1),) * 131_072,
    )
    encode_catalog(Catalog.of(4, UUID(int=1), (record,), ()))
    with pytest.raises(LimitError, match="262144 runs of chunks, got 1 and 262145"):
        encode_catalog(Catalog.of(4, UUID(int=1), (record,), (ChunkRun(0, 1),)))


# ---- the attribute segment -----------------------------------------------------------------------

EXTENT_AT = FIRST + 80  # offset of the extent in the catalog


def with_extent(catalog: Catalog, extent: AttributeExtent) -> Catalog:
    """Return the catalog with an attribute segment in its first dataset."""
    first, second = catalog.datasets
    return with_records(catalog, replace(first, attribute_extent=extent), second)


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
    wanted = with_extent(catalog, extent)
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
        (AttributeExtent(32768, 20480, 4096), "end of the attributes 49152, got 65536"),
        (AttributeExtent(49152, 4096, 4096), "end of the attributes 49152, got 65536"),
        (AttributeExtent(1 << 56, 4096, 4096), "attribute address in"),
        (AttributeExtent(0, 1 << 63, 4096), "attribute bytes in"),
    ],
)
def test_an_attribute_segment_that_cannot_be(
    catalog: Catalog, superblock: Superblock, extent: AttributeExtent, message: str
) -> None:
    right = with_extent(catalog, AttributeExtent(32768, 4096, 4096))
    place = (extent.address, extent.segment_bytes, extent.head_bytes)
    refused(superblock, patched(right, "QQQ", EXTENT_AT, *place), message)


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        (AttributeExtent(16384, 4096, 4096), "end of the attributes 49152, got 32768"),
        (AttributeExtent(32768 + 4096, 4096, 4096), "past a chunk in the attribute address 0, got"),
        (AttributeExtent(0, 16384, 4096), "end of the attributes 49152, got 16384"),
    ],
)
def test_an_attribute_segment_in_other_chunks(
    catalog: Catalog, superblock: Superblock, extent: AttributeExtent, message: str
) -> None:
    wrong = with_extent(catalog, extent)
    with pytest.raises(UsageError, match=message):
        check_catalog(wrong, superblock)
    refused(superblock, encode_catalog(wrong), message)


# ---- unfinished imports --------------------------------------------------------------------------


def with_unfinished(catalog: Catalog, **changes: Any) -> Catalog:
    """Return the catalog with an unfinished record, in chunks that were free."""
    fields = {
        "name": b"digits", "version": 0, "state": "unfinished", "uuid": UUID(int=102),
        "created_ns": 5, "sample_count": 7, "sample_bytes": 100, "layout": "path", "seed": 0,
        "data_runs": (ChunkRun(10, 2),), "data_bytes": 2 * 16384, "directory_runs": (),
        "entries_bytes": 0, "names_bytes": 0, "journal_runs": (ChunkRun(4, 1),),
        "journal_bytes": 100, "tags": ((TAG_SOURCE, b"where from"),),
    }  # fmt: skip
    record = DatasetRecord(**{**fields, **changes})
    free = (ChunkRun(7, 2), ChunkRun(12, 114))
    records = sorted([*catalog.datasets, record], key=lambda record: record.key)
    return Catalog.of(4, UUID(int=1), records, free)


def test_an_unfinished_record_is_no_dataset(catalog: Catalog, superblock: Superblock) -> None:
    wanted = with_unfinished(catalog)
    check_catalog(wanted, superblock)
    raw = encode_catalog(wanted)
    got = decode_catalog(raw, signed(superblock, raw), WHERE)
    assert got == wanted
    assert got.datasets == catalog.datasets
    assert got.find(b"digits") == list(catalog.datasets)
    assert got.find(b"digits", 0) == []
    (unfinished,) = got.unfinished
    assert (len(got.records), unfinished.key) == (3, (b"digits", 0))
    assert got.has_uuid(UUID(int=102))
    assert got.find_uuid(UUID(int=102)) is None
    granted = with_unfinished(
        catalog, journal_runs=(), journal_bytes=0, granted_runs=(ChunkRun(4, 1),)
    )
    check_catalog(granted, superblock)
    raw = encode_catalog(granted)
    (got_granted,) = decode_catalog(raw, signed(superblock, raw), WHERE).unfinished
    assert got_granted.granted_runs == (ChunkRun(4, 1),)
    alone = with_unfinished(catalog, name=b"other")
    assert b"other" not in alone
    assert alone.dataset_names() == [b"digits"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1, "name": b"e"}, r"version in 0\.\.0, got 1"),
        ({"entries_bytes": 4096}, r"entries bytes in 0\.\.0"),
        ({"directory_runs": (ChunkRun(12, 1),)}, "directory chunks 0, got 1"),
        ({"data_bytes": 16384}, "data bytes 32768, got 16384"),
        ({"journal_bytes": 16385}, "journal bytes in 1 chunks, got 16385"),
        ({"attribute_extent": AttributeExtent(0, 32768, 4096)}, "attribute bytes in"),
        ({"tags": ((TAG_SOURCE, bytes(16 << 10) + b"x"),)}, "description of its source"),
        ({"tags": ((TAG_SOURCE, b"a"), (TAG_SOURCE, b"b"))}, "description of its source"),
        ({"journal_runs": (ChunkRun(4, 1), ChunkRun(10, 1))}, "two owners at chunk 1[01]"),
        ({"granted_runs": (ChunkRun(10, 1),)}, "two owners at chunk 1[01]"),
        ({"tags": ((TAG_TERM, bytes(16)),)}, "term of a coordinator of 24 to 24 bytes"),
    ],
)
def test_a_malformed_unfinished_record(
    catalog: Catalog, superblock: Superblock, change: dict[str, Any], message: str
) -> None:
    refused(superblock, encode_catalog(with_unfinished(catalog, **change)), message)


# ---- the next generation -------------------------------------------------------------------------


def test_an_edited_catalog_has_the_other_records_as_they_were(catalog: Catalog) -> None:
    names = [b"a", b"b", b"b", b"c\xff", b"c\xff\xff", b"d"]
    template = catalog.datasets[0]
    records = [
        replace(
            template,
            name=name,
            version=number + 1,
            uuid=UUID(int=number),
            tags=((9, name),),
        )
        for number, name in enumerate(names)
    ]
    before = with_records(catalog, *records)
    for removed in itertools.chain.from_iterable(
        itertools.combinations(range(6), count) for count in range(7)
    ):
        gone = [records[number] for number in removed]
        added = [replace(record, uuid=UUID(int=77)) for record in gone[::2]]
        added += [replace(template, name=name) for name in (b"0", b"bb", b"e")]
        expected = sorted(
            [record for record in records if record not in gone] + added, key=lambda r: r.key
        )
        edited = before.edited(gone[::-1], added[::-1])
        assert list(edited.records) == expected
        assert edited == Catalog.of(5, UUID(int=1), expected, catalog.free)
    with pytest.raises(UsageError, match="expected dataset 'b' version 2, got none"):
        before.edited([replace(records[1], uuid=UUID(int=9))], [])


def test_records_are_a_sequence(catalog: Catalog) -> None:
    records = catalog.records
    assert records[-1] == records[1] == list(records)[1]
    assert records[:1] == [records[0]]
    assert [record.version for record in records[::-1]] == [2, 1]
    with pytest.raises(IndexError):
        records[2]
    assert repr(records) == "<Records [(b'digits', 1), (b'digits', 2)]>"
