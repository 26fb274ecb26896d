from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dlfs.base.json_records import from_json, parse_json, to_json
from dlfs.errors import FormatError


@dataclass(frozen=True)
class Inner:
    name: str
    count: int = 0


@dataclass(frozen=True)
class Outer:
    uuid: UUID
    created: datetime
    inner: tuple[Inner, ...]
    reason: str | None = None


OUTER = Outer(UUID(int=7), datetime(2026, 1, 2, tzinfo=UTC), (Inner("a", 1), Inner("caf\udce9")))


def test_records_come_back() -> None:
    text = to_json(OUTER)
    assert text.isascii()
    assert b"\n" not in text
    assert from_json(text, Outer) == OUTER


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "expected JSON, got b'{'"),
        ("[" * 100_000, "expected JSON"),
        (b'{"name": 1}', "Expected `str`, got `int`"),
        (b'{"name": "a", "count": true}', "Expected `int`, got `bool`"),
        (b'{"name": "a", "count": 1.0}', "Expected `int`, got `float`"),
        (b'{"count": 1}', "missing required field `name`"),
        (b"[]", "Expected `object`, got `array`"),
    ],
)
def test_other_text_is_a_format_error(text: str | bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem.replace("[", r"\[")):
        from_json(text, Inner)


def test_long_text_is_cut_in_errors() -> None:
    with pytest.raises(FormatError) as caught:
        parse_json("x" * 10_000)
    assert len(str(caught.value)) < 200
