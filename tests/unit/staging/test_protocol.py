"""The extended attributes: options, status and contents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.errors import UsageError
from dlfs.staging.protocol import SealOptions, SealStatus, StagedContents


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (b"", SealOptions()),
        (b"1\n", SealOptions()),
        (b"layout=path", SealOptions("path")),
        (b"seed=7, links=skip", SealOptions(seed=7, links="skip")),
        (b'{"layout": "path", "seed": 18446744073709551615}', SealOptions("path", (1 << 64) - 1)),
    ],
)
def test_options(value: bytes, options: SealOptions) -> None:
    assert SealOptions.decode(value) == options
    assert SealOptions.decode(options.encode()) == options


@pytest.mark.parametrize(
    "value",
    [b"yes", b"layout=", b"seed=x", b"seed=-1", b'{"seed": 1.5}', b'{"seed": true}',
     b'{"links": []}', b"links=follow", b"size=3", b'{"size": 3}', b"{",
     b'{"seed":' + b"[" * 1000, b" " * 1025, b"seed=" + b"9" * 1000, "seed=\u00b2".encode()],
)  # fmt: skip
def test_wrong_options(value: bytes) -> None:
    with pytest.raises(UsageError, match="seal: expected"):
        SealOptions.decode(value)


@given(st.binary(max_size=1100))
def test_any_bytes_are_options_or_an_error(value: bytes) -> None:
    try:
        options = SealOptions.decode(value)
    except UsageError:
        return
    assert SealOptions.decode(options.encode()) == options


def test_status_and_contents() -> None:
    status = SealStatus("sealed", None, None, 3, 3, 5, 5, 0.5, 2, {"symbolic link": 1}, 4)
    assert SealStatus.decode(status.encode()) == status
    assert StagedContents.decode(StagedContents(1, 2, 3.5).encode()) == StagedContents(1, 2, 3.5)
