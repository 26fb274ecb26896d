"""Wild frames and messages of the control protocol: a typed error or a message, never else.

What is sent to a real service over its socket is in tests/service; here the codec stands alone.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.errors import DlfsError, FormatError, LimitError, NativeError, TruncatedError
from dlfs.service import protocol
from dlfs.service.protocol import (
    ANSWERS,
    FRAME_BYTES_MAX,
    HEADER,
    REQUESTS,
    Failure,
    Message,
    Statistics,
    body_bytes,
    decode,
    encode,
    error_of,
    failure_of,
)

ALL = REQUESTS + ANSWERS
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field of a message."""
    simple = {
        int: st.integers(),
        str: st.text(),
        bool: st.booleans(),
        UUID: st.uuids(),
        datetime: st.datetimes(timezones=st.just(UTC)),
    }
    if kind in simple:
        return simple[kind]
    if get_origin(kind) is Annotated:
        (bounds,) = kind.__metadata__
        return st.integers(bounds.ge, bounds.le)
    if dataclasses.is_dataclass(kind) or (
        isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ):
        return messages(kind)
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=4).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(), st.integers() | st.text(), max_size=4)
    return st.none() | values(next(one for one in get_args(kind) if one is not type(None)))


def messages(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values(hints[name]) for name in field_names(kind)})


def field_names(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass or struct."""
    found = (
        dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    )
    return [field.name for field in found]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_comes_back(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    frame = encode(message)
    body = frame[HEADER.size :]
    assert body_bytes(frame[: HEADER.size]) == len(body)
    assert decode(body, (kind,)) == message


@given(st.binary(max_size=300))
def test_wild_bytes_are_a_format_error(body: bytes) -> None:
    with pytest.raises(FormatError):
        decode(body, ALL)


@given(st.sampled_from(ALL), st.data())
def test_wild_fields_are_a_message_or_a_format_error(
    kind: type[Message], data: st.DataObject
) -> None:
    names = [*field_names(kind), "other"]
    found = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, PLAIN)))
    try:
        message = decode(json.dumps({"kind": kind.__name__, **found}).encode(), ALL)
    except FormatError:
        return
    assert isinstance(message, kind)
    assert decode(encode(message)[HEADER.size :], ALL) == message


@given(st.binary(max_size=8))
def test_a_header_is_a_length_or_an_error(header: bytes) -> None:
    try:
        length = body_bytes(header)
    except FormatError:
        assert len(header) != 4 or not 2 <= int.from_bytes(header, "little") <= FRAME_BYTES_MAX
    else:
        assert length == int.from_bytes(header, "little")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"kind": "Hello", "protocol": 1' + b"0" * 5000 + b', "version": ""}',
        b'{"kind": "Hello", "protocol": true, "version": ""}',
        b'{"kind": "Hello", "protocol": 1.0, "version": ""}',
        b'{"kind": "Hello", "protocol": 1, "version": "", "more": 1}',
        b'{"kind": "Welcome", "protocol": 1, "version": "", "pid": 1}',
        b'{"kind": ["Hello"], "protocol": 1, "version": ""}',
        b'{"kind": "OpenChannel", "dataset": "no uuid"}',
        b'{"kind": "Hello", "protocol": -1, "version": ""}',
        b'{"kind": "Hello", "protocol": 9223372036854775808, "version": ""}',
        b'{"kind": "Hello", "protocol": 1, "version": "", "\\udcff": 1}',
        b'{"kind": "Hello", "protocol": 1}',
        b'"Hello"',
        b"\xff\xfe",
    ],
)
def test_hostile_messages_are_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        decode(body, REQUESTS)


def test_names_that_are_not_utf8_come_back() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    for message in (Failure("UsageError", name, 0), Statistics({name: [name]})):
        assert decode(encode(message)[HEADER.size :], ANSWERS) == message


def test_a_short_header_is_truncated() -> None:
    with pytest.raises(TruncatedError, match="expected a header of 4 bytes, got 3"):
        body_bytes(b"\0\0\0")


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(LimitError, match="send Statistics"):
        encode(Statistics({"x": "y" * FRAME_BYTES_MAX}))


def every_error() -> list[type[DlfsError]]:
    found, rest = [], [DlfsError]
    while rest:
        kind = rest.pop()
        rest += [k for k in kind.__subclasses__() if k.__module__ == "dlfs.errors"]
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_crosses(kind: type[DlfsError]) -> None:
    error = error_of(failure_of(kind("read sample 3: what happened")))
    assert type(error) is kind
    assert str(error) == "read sample 3: what happened"


def test_other_errors_cross_as_the_nearest() -> None:
    system = error_of(failure_of(OSError(5, "bad")))
    assert (type(system).__name__, system.errno) == ("DeviceError", 5)  # type: ignore[attr-defined]
    assert isinstance(error_of(failure_of(MemoryError())), NativeError)
    assert isinstance(error_of(Failure("os", "x", 0)), NativeError)
    assert isinstance(error_of(Failure("annotations", "x", 0)), NativeError)
    assert len(failure_of(DlfsError("x" * 10**6)).message) <= protocol.MESSAGE_BYTES_MAX
