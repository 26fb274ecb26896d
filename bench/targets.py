"""A data set on a namespace that a target serves: ``--target``.

The namespace is formatted, filled, and wiped in the end: it should be a RAM disk, so that a race
shows what initiators cost and not what a disk does. One that holds anything but what a benchmark
left is refused without ``--force``.
"""

from __future__ import annotations

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
from bench.machine import Unavailable
from dlfs.block import open_device
from dlfs.units import MIB

LABEL = "dlfs bench"
FILL_BYTES = MIB
WIPED_BYTES = 2 * MIB
"""At either end of a namespace: where a volume says that it is one."""


class OccupiedError(Exception):
    """The namespace holds something that is not ours to overwrite."""


@dataclass(frozen=True, slots=True)
class Targets:
    """One namespace, by the URIs of the initiators that race to it.

    Attributes:
        uris: each of another scheme.
        force: overwrite what the namespace holds.
    """

    uris: tuple[str, ...] = ()
    force: bool = False

    def uri(self, scheme: str) -> str:
        """The URI of a scheme.

        Raises:
            Unavailable: none was given.
        """
        for uri in self.uris:
            if uri.startswith(f"{scheme}:"):
                return uri
        raise Unavailable(f"no --target {scheme}:... was given")

    def make_scene(self, spec: DatasetSpec, folder: Path, total_bytes: int, seed: int) -> Scene:
        """Lay a data set out on the namespace, as much of it as fits.

        Raises:
            Unavailable: no target was given.
            OccupiedError: the namespace holds something.
            UsageError: the URIs name different namespaces.
        """
        if not self.uris:
            raise Unavailable("no --target was given")
        self._check_same()
        with open_device(self.uris[0]) as device:
            room = device.size_bytes
        source = SyntheticSource(spec, total_bytes, seed)
        while volume_bytes(len(source.lengths), int(source.lengths.sum())) > room:
            if total_bytes < spec.mean_bytes:
                raise dlfs.UsageError(f"measure {self.uris[0]}: {room} bytes are too few")
            total_bytes //= 2
            source = SyntheticSource(spec, total_bytes, seed)
        self._format(force=self.force or self._is_ours())
        self._fill()
        self._format(force=True)
        write_volume(self.uris[0], source)
        folder.mkdir(parents=True, exist_ok=True)
        scene = scene_of_volume(spec, source, folder, self.uris[0], np.arange(0), seed)
        scene.targets = self
        return scene

    def _check_same(self) -> None:
        identities = set()
        for uri in self.uris:
            with open_device(uri) as device:
                identities.add(device.identity)
        if len(identities) > 1:
            raise dlfs.UsageError(f"measure {', '.join(self.uris)}: expected one namespace")

    def _fill(self) -> None:
        """Write every block: reading memory that a target never wrote is another thing.

        Its pages are one page of zeros, which stays in a cache, or none yet.
        """
        with open_device(self.uris[0], writable=True) as device:
            piece = np.random.default_rng(0).integers(0, 256, FILL_BYTES, np.uint8).tobytes()
            for offset in range(0, device.size_bytes, len(piece)):
                device.write(offset, piece[: device.size_bytes - offset])
            device.flush()

    def _format(self, *, force: bool) -> None:
        uri = self.uris[0]
        try:
            dlfs.format_volume(uri, label=LABEL, force=force)
        except dlfs.ExistsError as error:
            text = str(error).replace("force=True", "--force")
            raise OccupiedError(text) from error

    def _is_ours(self) -> bool:
        try:
            with dlfs.open(self.uris[0]) as volume:
                return volume.label == LABEL
        except dlfs.DlfsError:
            return False

    def wipe(self) -> None:
        """Leave the namespace without a volume."""
        with open_device(self.uris[0], writable=True) as device:
            zeros = bytes(min(WIPED_BYTES, device.size_bytes))
            device.write(0, zeros)
            device.write(device.size_bytes - len(zeros), zeros)
            device.flush()
