"""Settings of all tests of faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_opening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Open volumes, of which there are thousands, with little memory of their own.

    With the default memory, to describe its chunks takes a third of the time of a test. Nor is the
    folder swept in which all processes of the machine share directories.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLFS_MEMORY", "32MiB")
        patch.setattr("dlfs.connection.connection.SHARED_ROOT", tmp_path_factory.mktemp("shared"))
        yield
