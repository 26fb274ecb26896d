"""The report of the records that imports left out of a dataset (FORMAT.md, section 4.2, tag 2).

It is a tagged value of the dataset's record, so it is renamed, moved and removed with the dataset.
It counts all records that were left out, and lists the first of them.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dlfs.base.json_records import from_json, to_json
from dlfs.errors import FormatError
from dlfs.format.constants import BAD_RECORDS_BYTES_MAX, CATALOG_BYTES_MAX, TAG_BAD_RECORDS

BAD_RECORDS_LISTED_MAX = 1000
"""Most records that a report lists; the others are counted."""

_COUNT = struct.Struct("<Q")
_CATALOG_SHARE = 64
"""A report takes at most this fraction of the space that is left in the catalog."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record of a source that an import left out.

    Attributes:
        source: path or URL of the source's file; bytes that are not UTF-8 are surrogate escapes.
        record: name of the record in it: a number, a member, a key, or the path of a file.
        reason: the error.
        version: version of the dataset whose import left it out; None in the report of this
            version.
    """

    source: str
    record: str
    reason: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class BadReport:
    """The records that imports left out of a dataset.

    Attributes:
        count: number of these records.
        reasons: number of them by kind of error.
        records: the first of them, at most ``BAD_RECORDS_LISTED_MAX``.
    """

    count: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    records: tuple[BadRecord, ...] = ()

    def __add__(self, other: BadReport) -> BadReport:
        """Return a report of the records of both."""
        reasons = Counter(self.reasons)
        reasons.update(other.reasons)
        listed = (*self.records, *other.records)[:BAD_RECORDS_LISTED_MAX]
        return BadReport(self.count + other.count, dict(reasons), listed)

    def without_first(self, first: BadReport) -> BadReport:
        """Return the report of the records of this one that another, earlier one does not have."""
        reasons = Counter(self.reasons)
        reasons.subtract(first.reasons)
        left = {reason: count for reason, count in reasons.items() if count > 0}
        known = set(first.records)
        records = tuple(record for record in self.records if record not in known)
        return BadReport(max(0, self.count - first.count), left, records)

    def merged(self, other: BadReport) -> BadReport:
        """Return a report of the records of both that does not depend on their order."""
        both = self + other
        listed = sorted(
            {*self.records, *other.records}, key=lambda one: (one.source, one.record, one.reason)
        )
        return replace(both, records=tuple(listed[:BAD_RECORDS_LISTED_MAX]))

    def of_version(self, version: int) -> BadReport:
        """Return the report of a version, for the report of another one that has its samples."""
        named = [
            record if record.version else replace(record, version=version)
            for record in self.records
        ]
        return replace(self, records=tuple(named))


@dataclass(frozen=True, slots=True)
class _Stored:
    """The JSON of a report."""

    reasons: dict[str, int]
    records: list[tuple[str, str, str, int | None]]


def encode_bad_records(report: BadReport, *, bytes_max: int = BAD_RECORDS_BYTES_MAX) -> bytes:
    """Return a report as a tagged value, with as many of the listed records as fit.

    Args:
        report: the report.
        bytes_max: most bytes of the value; one without listed records may have more.
    """
    listed = [(one.source, one.record, one.reason, one.version) for one in report.records]
    while True:
        text = to_json(_Stored(dict(report.reasons), listed))
        raw = _COUNT.pack(report.count) + zlib.compress(text)
        if len(raw) <= bytes_max or not listed:
            return raw
        listed = listed[: min(len(listed) - 1, len(listed) * bytes_max // len(raw))]


def decode_bad_records(raw: bytes) -> BadReport:
    """Return the report in a tagged value.

    Raises:
        FormatError: the value is malformed.
    """
    try:
        stored = from_json(zlib.decompress(raw[_COUNT.size :]), _Stored)
    except zlib.error as error:
        raise FormatError(f"read the report of bad records: expected zlib data: {error}") from error
    except FormatError as error:
        raise FormatError(f"read the report of bad records: {error}") from error
    records = tuple(BadRecord(*one) for one in stored.records)
    return BadReport(count_bad_records(raw), stored.reasons, records)


def count_bad_records(raw: bytes) -> int:
    """Return the number of records that a tagged value reports.

    Raises:
        FormatError: the value is too short.
    """
    if len(raw) < _COUNT.size:
        raise FormatError(
            f"read the report of bad records: expected {_COUNT.size} bytes, got {len(raw)}"
        )
    return int(_COUNT.unpack_from(raw)[0])


def find_bad_records(tags: Iterable[tuple[int, bytes]]) -> bytes | None:
    """Return the tagged value with the report of bad records; None if a record has none."""
    return next((value for tag, value in tags if tag == TAG_BAD_RECORDS), None)


def read_bad_records(tags: Iterable[tuple[int, bytes]]) -> BadReport:
    """Return the report in the tagged values of a record; an empty one if it has none.

    Raises:
        FormatError: the report is malformed.
    """
    raw = find_bad_records(tags)
    return BadReport() if raw is None else decode_bad_records(raw)


def bad_records_tags(report: BadReport, catalog_bytes: int) -> tuple[tuple[int, bytes], ...]:
    """Return the tagged values of a report: none if nothing was left out.

    Args:
        report: the report.
        catalog_bytes: length of the catalog without the record.
    """
    if not report.count:
        return ()
    room = (CATALOG_BYTES_MAX - catalog_bytes) // _CATALOG_SHARE
    bytes_max = min(BAD_RECORDS_BYTES_MAX, room)
    return ((TAG_BAD_RECORDS, encode_bad_records(report, bytes_max=bytes_max)),)
