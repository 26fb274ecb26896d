"""Writes datasets under names that the format allows and that new datasets may not have.

Code of before the rule (FORMAT.md, section 7) did so, and its volumes must stay readable.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import dlfs
from dlfs.format.names import dataset_name_bytes


def old_writer(volume: dlfs.Volume, name: str | bytes, **options: Any) -> dlfs.DatasetWriter:
    """As ``Volume.writer`` was when it took every name that the format allows."""
    with mock.patch("dlfs.volume.volume.new_dataset_name", dataset_name_bytes):
        return volume.writer(name, **options)
