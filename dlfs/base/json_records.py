"""Writes dataclasses and msgspec structs as JSON, and reads them back with their types checked.

The JSON text is the standard library's. msgspec's own encoder refuses strings with surrogates,
which stand for bytes of paths and names that are not UTF-8. msgspec turns records into plain values
and back: an ``int`` field takes no bool and no float, UUIDs and times are parsed, missing fields
without a default are an error. Unknown fields are an error only for structs that forbid them.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from dlfs.errors import FormatError

_EXCERPT_BYTES = 80

Record = TypeVar("Record")


def to_json(record: Any) -> bytes:
    """Return a dataclass, struct or dict, with all records inside it, as one line of JSON."""
    return json.dumps(msgspec.to_builtins(record)).encode("ascii")


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON into plain values.

    Raises:
        FormatError: the text is not JSON, is nested too deeply, or has an integer of more than
            4300 digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected JSON, got {excerpt(text)}") from error


def to_record(values: Any, kind: type[Record]) -> Record:
    """Convert plain values of JSON to a dataclass or struct.

    Raises:
        FormatError: a field is missing, has another type, or is out of its bounds; or a struct that
            forbids unknown fields got one.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise FormatError(str(error)) from error


def from_json(text: str | bytes | bytearray, kind: type[Record]) -> Record:
    """Read what ``to_json`` wrote.

    Raises:
        FormatError: the text is not JSON, or not a record of this kind.
    """
    return to_record(parse_json(text), kind)


def excerpt(text: str | bytes | bytearray) -> str:
    """Return the beginning of a text for an error message."""
    return repr(text[:_EXCERPT_BYTES] if isinstance(text, str) else bytes(text[:_EXCERPT_BYTES]))
