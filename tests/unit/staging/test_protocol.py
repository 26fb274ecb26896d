"""Requests to a staging area's server, and its answers."""

from __future__ import annotations

import pytest

from dlfs.base.json_records import from_json, to_json
from dlfs.errors import FormatError, UsageError
from dlfs.staging.protocol import (
    SealAnswer,
    SealOptions,
    SealRequest,
    SealStatus,
    StagedContents,
    StagedDataset,
)


def test_messages_survive_the_wire() -> None:
    request = SealRequest("seal", "odd\udcff\n", SealOptions("path", (1 << 64) - 1, "skip", True))
    status = SealStatus("open", "why", "LockedError", 16, 3, 3, 5, 5, 0.5, 2, {"link": 1}, 4)
    staged = StagedDataset("a\udcfe", StagedContents(1, 2, 3.5), status)
    answer = SealAnswer(status, final=True, datasets=(staged,))
    assert from_json(to_json(request), SealRequest) == request
    assert from_json(to_json(answer), SealAnswer) == answer
    assert b"\n" not in to_json(request)


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b'{"action": "format"}', b'{"action": "seal", "name": 7}',
     b'{"action": "seal", "options": {"links": "follow"}}',
     b'{"action": "seal", "options": {"layout": "fast"}}',
     b'{"action": "seal", "options": {"seed": -1}}',
     b'{"action": "seal", "options": {"seed": 18446744073709551616}}'],
)  # fmt: skip
def test_malformed_requests(line: bytes) -> None:
    with pytest.raises((FormatError, UsageError)):
        from_json(line, SealRequest)
