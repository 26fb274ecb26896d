"""The report of bad records as a tagged value: round trips, its bound, malformed ones."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.errors import FormatError
from dlfs.format.bad_records import (
    BadRecord,
    BadReport,
    bad_records_tags,
    count_bad_records,
    decode_bad_records,
    encode_bad_records,
    read_bad_records,
)
from dlfs.format.constants import BAD_RECORDS_BYTES_MAX, CATALOG_BYTES_MAX, TAG_BAD_RECORDS

TEXTS = st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
RECORDS = st.builds(BadRecord, TEXTS, TEXTS, TEXTS, st.none() | st.integers(1, 2**32 - 1))
REPORTS = st.builds(
    BadReport,
    st.integers(0, 2**64 - 1),
    st.dictionaries(TEXTS, st.integers(1, 2**63 - 1), max_size=5),
    st.lists(RECORDS, max_size=20).map(tuple),
)


@given(REPORTS)
def test_reports_come_back(report: BadReport) -> None:
    raw = encode_bad_records(report)
    assert decode_bad_records(raw) == report
    assert count_bad_records(raw) == report.count
    tags = bad_records_tags(report, 0)
    assert read_bad_records(tags) == (report if report.count else BadReport())


@pytest.mark.parametrize("bytes_max", [300, 5000, BAD_RECORDS_BYTES_MAX])
def test_as_many_records_are_listed_as_fit(bytes_max: int) -> None:
    noise = random.Random(5)
    records = [BadRecord("f", noise.randbytes(100).hex(), "r") for _ in range(1000)]
    report = BadReport(5000, {"malformed": 5000}, tuple(records))
    raw = encode_bad_records(report, bytes_max=bytes_max)
    assert bytes_max * 0.5 < len(raw) <= bytes_max
    found = decode_bad_records(raw)
    assert found.records == report.records[: len(found.records)]
    assert replace(found, records=()) == replace(report, records=())


def test_a_catalog_without_room_has_the_counts() -> None:
    report = BadReport(2, {"malformed": 2}, (BadRecord("f", "1", "r"),))
    ((tag, raw),) = bad_records_tags(report, CATALOG_BYTES_MAX)
    assert tag == TAG_BAD_RECORDS
    assert decode_bad_records(raw) == replace(report, records=())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(8),
        bytes(8) + b"no zlib",
        bytes(8) + zlib.compress(b"no JSON"),
        bytes(8) + zlib.compress(b'{"reasons": {}}'),
        bytes(8) + zlib.compress(b'{"reasons": {}, "records": [["a", "b"]]}'),
        bytes(8) + zlib.compress(b'{"reasons": {"a": "b"}, "records": []}'),
    ],
)
def test_malformed_reports_are_refused(raw: bytes) -> None:
    with pytest.raises(FormatError, match="read the report of bad records: "):
        decode_bad_records(raw)


def test_reports_of_steps_add_up_in_any_order() -> None:
    records = [BadRecord(source, f"record {n}", "cut short") for source in "ba" for n in range(3)]
    reports = [BadReport(1, {"cut short": 1}, (record,)) for record in records]
    merged = [BadReport(), BadReport()]
    for number in range(len(records)):
        merged[0] = merged[0].merged(reports[number])
        merged[1] = merged[1].merged(reports[-1 - number])
    assert merged[0] == merged[1]
    assert (merged[0].count, merged[0].reasons) == (6, {"cut short": 6})
    assert merged[0].records == tuple(sorted(records, key=lambda one: (one.source, one.record)))
    later = reports[0] + reports[1]
    assert later.without_first(reports[0]) == reports[1]
    assert later.without_first(later) == BadReport()
