"""Tests the timeout of a read: at least as long as its devices are configured to try."""

from __future__ import annotations

from pathlib import Path

import pytest

import dlfs
from dlfs._native.reader import NativeReader
from dlfs.block import MemoryDevice, MissingDevice
from dlfs.errors import NotFoundError
from dlfs.reader import read_timeout_ms
from tests.support.nvme import ScriptedTarget
from tests.unit.store.nodes import SAMPLES, make_volume, nqn, serve, subsystem


@pytest.mark.parametrize(
    ("options", "expected_ms"),
    [("", 30_000), ("&reconnect_ms=60000", 66_000), ("&timeout_ms=9000&reconnect_ms=0", 30_000)],
)
def test_a_read_waits_as_long_as_its_device_looks_for_its_target(
    tmp_path: Path, options: str, expected_ms: int
) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    with ScriptedTarget([subsystem("x", [serve(path)])]) as target:
        uri = f"nvme-tcp://127.0.0.1:{target.port}/{nqn('x')}?nsid=1{options}"
        with dlfs.open(uri) as volume, volume["small"] as dataset:
            assert dataset.get(b"007") == SAMPLES[b"007"]
            reader = dataset.session.reader.native
            assert isinstance(reader, NativeReader)
            assert reader.timeout_ms == expected_ms


def test_devices_without_a_timeout_leave_the_default() -> None:
    with MemoryDevice("patience", 1 << 20, writable=True) as device:
        missing = MissingDevice("gone", NotFoundError("no such file"))
        assert read_timeout_ms([device, missing]) == read_timeout_ms([]) == 30_000
    MemoryDevice.forget("patience")
