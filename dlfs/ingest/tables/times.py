"""Writes times, durations and decimals of Arrow arrays as text that has every digit of the value.

A timestamp is ``2024-01-01 12:30:00.250``: it has the digits of its unit, and the offset of its
time zone, if it has one, ``Z`` or ``+0200``. A duration is its number and unit, ``1500ms``. Other
types are as Arrow writes them.

Arrow itself shortens offsets to minutes, lets nanoseconds overflow where an offset is added, and
writes what it cannot represent as ``<value out of range>``; that is an error here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlfs.errors import FormatError
from dlfs.ingest.source import Array, Int64Array
from dlfs.ingest.tables.arrow import compute, pyarrow, types

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_YEARS = -32766, 32767
"""First year that is written, and the one after the last; Arrow knows few more."""
_DAY_S = 86400


class ValueProblem(Exception):
    """A value has no text.

    Args:
        index: index of the value in its array.
        text: what was expected, and what it is.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


def time_texts(array: Any) -> Any:
    """Return the texts of an array of times, durations or decimals, as Arrow's ``large_string``.

    Raises:
        ValueProblem: a value is out of the range of its type.
        FormatError: the time zone is unknown.
    """
    types, kind = pyarrow.types, array.type
    if types.is_timestamp(kind):
        return timestamp_texts(array, numbers_of(array), kind.unit)
    if types.is_duration(kind):
        return _texts(array, [f"{value}{kind.unit}" for value in numbers_of(array).tolist()])
    if types.is_date(kind) or types.is_time(kind):
        _check_range(array, kind)
    return array.cast(pyarrow.large_string())


def timestamp_texts(array: Any, numbers: Int64Array, unit: str, more: Array | None = None) -> Any:
    """Return the texts of timestamps.

    Args:
        array: array of timestamps, for its zone and its nulls.
        numbers: ``int64[n]``, time of each since 1970 in units, any for a null.
        unit: ``s``, ``ms``, ``us`` or ``ns``.
        more: ``int64[n]``, three more digits after those of the unit.

    Raises:
        ValueProblem: a year is out of range.
        FormatError: the time zone is unknown.
    """
    digits = _DIGITS[unit]
    seconds, parts = np.divmod(numbers, 10**digits)
    _check_bounds(array, seconds, _years("s"), "s")
    moments = pyarrow.array(seconds).view(pyarrow.timestamp("s"))
    offsets = _offsets(moments, array.type.tz)
    local = pyarrow.array(seconds + offsets).view(pyarrow.timestamp("s"))
    texts = local.cast("string").to_pylist()
    if more is not None:
        digits, parts = digits + 3, parts * 1000 + more
    if digits:
        texts = [f"{text}.{part:0{digits}d}" for text, part in zip(texts, parts, strict=True)]
    if array.type.tz == "UTC":
        texts = [text + "Z" for text in texts]
    elif array.type.tz:
        ends = {offset: _offset_text(offset) for offset in np.unique(offsets).tolist()}
        texts = [text + ends[offset] for text, offset in zip(texts, offsets.tolist(), strict=True)]
    return _texts(array, texts)


def numbers_of(array: Any) -> Int64Array:
    """Return the numbers that times are stored as, ``int64[n]``; 0 for nulls."""
    stored = array.view(pyarrow.int64() if array.type.bit_width == 64 else pyarrow.int32())
    numbers: Array = stored.fill_null(0).to_numpy(zero_copy_only=False)
    return numbers.astype(np.int64, copy=False)


def _texts(array: Any, texts: list[str]) -> Any:
    """Return texts as an array with the nulls of another."""
    mask = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return pyarrow.array(texts, pyarrow.large_string(), mask=mask)


def _offsets(moments: Any, zone: str | None) -> Int64Array:
    """Return the offset of local time from UTC at each moment, in seconds, ``int64[n]``."""
    if not zone or zone == "UTC":
        return np.zeros(len(moments), np.int64)
    zoned = moments.view(pyarrow.int64()).view(pyarrow.timestamp("s", zone))
    try:
        local = compute.local_timestamp(zoned)
    except pyarrow.ArrowInvalid as error:
        raise FormatError(f"expected a known time zone, got {zone!r}") from error
    found: Int64Array = numbers_of(local) - numbers_of(moments)
    return found


def _offset_text(offset_s: int) -> str:
    sign, minutes = "-" if offset_s < 0 else "+", abs(offset_s) // 60
    seconds = abs(offset_s) % 60
    return f"{sign}{minutes // 60:02d}{minutes % 60:02d}" + (f"{seconds:02d}" if seconds else "")


def _check_range(array: Any, kind: Any) -> None:
    numbers = numbers_of(array)
    if types.is_time(kind):
        _check_bounds(array, numbers, (0, _DAY_S * 10 ** _DIGITS[kind.unit]), kind.unit)
        return
    unit = "D" if types.is_date32(kind) else "ms"
    _check_bounds(array, numbers, _years(unit), unit)
    if unit == "ms" and (parts := np.flatnonzero(numbers % (_DAY_S * 1000))).size:
        at = int(parts[0])
        raise ValueProblem(at, f"expected whole days of {kind}, got {numbers[at]}")


def _years(unit: str) -> tuple[int, int]:
    bounds = np.array([str(year) for year in _YEARS], f"datetime64[{unit}]").view(np.int64)
    first, end = bounds.tolist()
    return first, end


def _check_bounds(array: Any, numbers: Int64Array, bounds: tuple[int, int], unit: str) -> None:
    wrong = np.flatnonzero((numbers < bounds[0]) | (numbers >= bounds[1]))
    if wrong.size:
        at = int(wrong[0])
        raise ValueProblem(
            at,
            f"expected a value of {array.type} in {bounds[0]}..{bounds[1] - 1} {unit}, got "
            f"{numbers[at]}",
        )
