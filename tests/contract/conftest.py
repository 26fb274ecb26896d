"""An empty volume to import into."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

import dlfs
from dlfs.volume.volume import Volume


@pytest.fixture
def volume() -> Iterator[Volume]:
    uri = f"mem:{uuid4().hex}?size=32MiB"
    dlfs.format_volume(uri)
    with dlfs.open(uri) as opened:
        yield opened
