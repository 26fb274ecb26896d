"""An empty volume to import into."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

import dlfs
from dlfs.volume.volume import Volume
from tests.support.volumes import new_volume


@pytest.fixture
def volume() -> Iterator[Volume]:
    with dlfs.open(new_volume(f"mem:{uuid4().hex}?size=32MiB")) as opened:
        yield opened
