"""Random changes of a volume and its members, compared with a dictionary."""

from __future__ import annotations

import contextlib
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice
from tests.support.volumes import read_datasets

CHUNK = 4 * KIB
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "remove", "grow", "rebalance", "shrink"]),
        st.integers(0, 1 << 30),
    ),
    min_size=3,
    max_size=8,
)

Model = dict[tuple[str, int], dict[bytes, bytes]]


class Changes:
    """A volume in memory, and what it must hold."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.names: list[str] = []
        self.model: Model = {}
        uris = self.new_devices(40)
        dlfs.format_volume(uris, chunk_bytes=CHUNK, block_bytes=512, replicas=replicas)
        self.volume = dlfs.open(uris)

    def new_devices(self, chunks: int) -> list[str]:
        """Return the URIs of as many new devices as there are replicas."""
        names = [f"resizing-{uuid.uuid4().hex}" for _ in range(self.replicas)]
        self.names += names
        return [f"mem:{name}?size={1 * MIB + (chunks + 1) * CHUNK}" for name in names]

    def write(self, number: int) -> None:
        self._add(self.volume.writer("data"), {}, number)

    def append(self, number: int) -> None:
        versions = [version for _, version in self.model]
        if versions:
            self._add(self.volume.append("data"), self.model["data", max(versions)], number)

    def _add(self, writer: dlfs.DatasetWriter, before: dict[bytes, bytes], number: int) -> None:
        added = {
            b"%d/%d" % (number, i): bytes([number % 251]) * (100 + number % 5000 * i)
            for i in range(1 + number % 4)
        }
        if added.keys() & before.keys():
            writer.abort()
            return
        with writer:
            for path, data in added.items():
                writer.add(path, data)
        newest = max(info.version for info in self.volume.versions("data"))
        self.model["data", newest] = {**before, **added}

    def remove(self, number: int) -> None:
        if self.model:
            name, version = list(self.model)[number % len(self.model)]
            self.volume.remove(name, version)
            del self.model[name, version]

    def grow(self, number: int) -> None:
        self.volume.grow(self.new_devices(10 + number % 40))

    def rebalance(self, _number: int) -> None:
        self.volume.rebalance()
        assert self.volume.rebalance().moved_bytes == 0

    def shrink(self, number: int) -> None:
        members = len(self.volume.members)
        if members > self.replicas:
            self.volume.shrink([number % members])

    def check(self) -> None:
        """Compare the volume with the model."""
        assert read_datasets(self.volume) == self.model
        assert list(self.volume.verify()) == []


@pytest.mark.parametrize("replicas", [1, 2])
@settings(max_examples=6, deadline=None)
@given(steps=STEPS)
def test_contents_survive_any_changes(replicas: int, steps: list[tuple[str, int]]) -> None:
    changes = Changes(replicas)
    try:
        for step, number in steps:
            with contextlib.suppress(dlfs.SpaceError):
                getattr(changes, step)(number)
        changes.check()
    finally:
        changes.volume.close()
        for name in changes.names:
            MemoryDevice.forget(name)
