"""Tests the largest gap between two samples that one request reads, by the kind of device."""

from __future__ import annotations

from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB
from tests.support.nvme import ScriptedTarget
from tests.unit.store.nodes import make_volume, nqn, serve, subsystem


def reads_of(uri: str, wanted: list[int]) -> int:
    with dlfs.open(uri, memory_bytes=1) as volume, volume["gaps"] as dataset:
        before = dataset.stats()["reads"]
        with dataset.read(wanted) as batch:
            assert [bytes(view[:1]) for view in batch] == [b"%d" % index for index in wanted]
        return dataset.stats()["reads"] - before


@pytest.mark.parametrize(("gap_bytes", "on_file", "on_target"), [(3 * KIB, 1, 1), (8 * KIB, 1, 2)])
def test_over_a_network_smaller_gaps_are_read(
    tmp_path: Path, gap_bytes: int, on_file: int, on_target: int
) -> None:
    _, (path,) = make_volume(tmp_path, "v", 1)
    with dlfs.open(str(path)) as volume, volume.writer("gaps", layout="path") as writer:
        more = [16 * KIB] * 6  # than memory holds: else chunks are read whole
        for index, length_bytes in enumerate([4 * KIB, gap_bytes, 4 * KIB, *more]):
            writer.add(b"%d" % index, b"%d" % index * length_bytes)
    assert reads_of(str(path), [0, 2]) == on_file
    with ScriptedTarget([subsystem("x", [serve(path)])]) as target:
        uri = f"nvme-tcp://127.0.0.1:{target.port}/{nqn('x')}?nsid=1"
        assert reads_of(uri, [0, 2]) == on_target
