"""A data set on a namespace that an NVMe-oF target serves: ``--target``.

The namespace is formatted, filled, and wiped in the end. It should be a RAM disk, so that the cases
compare initiators and not disks. A namespace with data that no benchmark wrote is refused without
``--force``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dlfs
from bench.datasets import (
    DatasetSpec,
    Scene,
    SyntheticSource,
    scene_of_volume,
    volume_bytes,
    write_volume,
)
from bench.errors import OccupiedError, Unavailable
from dlfs.base.units import MIB
from dlfs.block import open_device

LABEL = "dlfs bench"
"""Label of the volumes of benchmarks: a namespace with it may be formatted again."""
FILL_BYTES = MIB
"""Bytes of one write when the namespace is filled."""
WIPED_BYTES = 2 * MIB
"""Bytes overwritten at either end of a namespace, where a volume has its superblocks."""


def uri_of(uris: Sequence[str], scheme: str) -> str:
    """Return the URI of a scheme, if one was given."""
    for uri in uris:
        if uri.startswith(f"{scheme}:"):
            return uri
    raise Unavailable(f"no --target {scheme}:... was given")


@dataclass(frozen=True, slots=True)
class Targets:
    """One namespace, by the URIs of the initiators that are compared on it.

    Attributes:
        uris: URIs, each of another scheme.
        force: overwrite the data of the namespace.
    """

    uris: tuple[str, ...] = ()
    force: bool = False

    def make_scene(self, spec: DatasetSpec, folder: Path, total_bytes: int, seed: int) -> Scene:
        """Lay a data set out on the namespace, as much of it as fits.

        Raises:
            Unavailable: no target was given.
            OccupiedError: the namespace contains other data.
            UsageError: the URIs name different namespaces, or the namespace is too small.
        """
        if not self.uris:
            raise Unavailable("no --target was given")
        self._check_same()
        with open_device(self.uris[0]) as device:
            room = device.size_bytes
        source = SyntheticSource(spec, total_bytes, seed)
        while volume_bytes(len(source), source.total_bytes()) > room:
            if total_bytes < spec.mean_bytes:
                raise dlfs.UsageError(f"measure {self.uris[0]}: {room} bytes are too few")
            total_bytes //= 2
            source = SyntheticSource(spec, total_bytes, seed)
        self._format(force=self.force or self._has_our_volume())
        self._fill()
        self._format(force=True)
        write_volume(self.uris[0], source)
        folder.mkdir(parents=True, exist_ok=True)
        scene = scene_of_volume(spec, source, folder, self.uris[0], np.arange(0), seed)
        scene.uris = self.uris
        return scene

    def _check_same(self) -> None:
        identities = set()
        for uri in self.uris:
            with open_device(uri) as device:
                identities.add(device.identity)
        if len(identities) > 1:
            raise dlfs.UsageError(f"measure {', '.join(self.uris)}: expected one namespace")

    def _fill(self) -> None:
        """Write every block.

        A target may back blocks that were never written by one page of zeros, or by no memory yet.
        Reading them would be faster than reading data.
        """
        with open_device(self.uris[0], writable=True) as device:
            data = np.random.default_rng(0).integers(0, 256, FILL_BYTES, np.uint8).tobytes()
            for offset in range(0, device.size_bytes, len(data)):
                device.write(offset, data[: device.size_bytes - offset])
            device.flush()

    def _format(self, *, force: bool) -> None:
        try:
            dlfs.format_volume(self.uris[0], label=LABEL, force=force)
        except dlfs.ExistsError as error:
            raise OccupiedError(str(error).replace("force=True", "--force")) from error

    def _has_our_volume(self) -> bool:
        try:
            with dlfs.open(self.uris[0]) as volume:
                return volume.label == LABEL
        except dlfs.DlfsError:
            return False

    def wipe(self) -> None:
        """Overwrite the volume's superblocks with zeros."""
        with open_device(self.uris[0], writable=True) as device:
            zeros = bytes(min(WIPED_BYTES, device.size_bytes))
            device.write(0, zeros)
            device.write(device.size_bytes - len(zeros), zeros)
            device.flush()
