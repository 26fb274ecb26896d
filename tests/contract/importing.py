"""Records that the tests of imported fields write."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest

from dlfs.ingest.formats.tfrecord.source import masked_crc32c


def frame(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]


def example_messages() -> Any:
    """Return the message classes of the package tfrecord, without loading PyTorch as it does."""
    package = importlib.util.find_spec("tfrecord")
    if package is None or not package.submodule_search_locations:
        pytest.skip("tfrecord is not installed")
    path = Path(package.submodule_search_locations[0]) / "example_pb2.py"
    spec = importlib.util.spec_from_file_location("example_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
