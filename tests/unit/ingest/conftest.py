"""An empty volume to import into; sources are read in this process unless a test isolates them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

import pytest

import dlfs
from dlfs.ingest import file_parts
from dlfs.ingest.registry import FormatOptions
from dlfs.ingest.source import Source
from dlfs.volume.volume import Volume
from tests.support.volumes import new_volume


@pytest.fixture(autouse=True)
def isolates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read sources in this process, which takes 1 s less, unless the test has the mark isolated."""
    if request.node.get_closest_marker("isolated") is None:
        monkeypatch.setattr(file_parts, "IsolatedSource", _open_inside)


def _open_inside(options: FormatOptions, paths: Sequence[str]) -> Source:
    return options.open(paths)


@pytest.fixture
def volume() -> Iterator[Volume]:
    with dlfs.open(new_volume(f"mem:{uuid4().hex}?size=32MiB")) as opened:
        yield opened
