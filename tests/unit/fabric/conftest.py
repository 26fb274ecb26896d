"""Fixtures of the tests of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fabric.configfs import FakeConfigfs


@pytest.fixture
def configfs(tmp_path: Path) -> FakeConfigfs:
    return FakeConfigfs(tmp_path)
