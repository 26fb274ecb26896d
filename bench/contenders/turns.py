"""Large files that are read in turns, a piece of each, with cold caches."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.contenders.mounts import SERVERS
from bench.measurement import Environment, Measurement, check_bytes
from bench.resources import cpu_seconds_of, timed
from bench.serving import Mounted, mount_dlfs
from dlfs.base.units import KIB, MIB

PIECE_BYTES = 256 * KIB
MEMORY_BYTES = 32 * MIB
"""Memory of the mount: less than one file."""


@dataclass(frozen=True)
class FilesInTurns:
    """All files, each from its beginning to its end, in turns of ``PIECE_BYTES``.

    Attributes:
        server: server of a DLFS mount with ``MEMORY_BYTES`` (`mount_dlfs`); empty for plain files.
    """

    server: str

    @property
    def label(self) -> str:
        where = SERVERS[self.server] if self.server else "plain files"
        return f"{where}, cold, files in turns of 256 KiB"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        indices = scene.file_indices.tolist()
        found = {index: bytearray() for index in indices}
        with self._tree(environment) as tree, ExitStack() as opened:
            files = {}
            for index in indices:
                path = Path(tree.files) / os.fsdecode(scene.source.path(index))
                files[index] = opened.enter_context(path.open("rb", buffering=0))
            environment.machine.require_cold()
            before, read_before = _used(tree)
            with timed() as watch:
                for _ in range(0, int(scene.source.lengths.max()), PIECE_BYTES):
                    for index, file in files.items():
                        found[index] += file.read(PIECE_BYTES)
            after, read_after = _used(tree)
        total = sum(map(len, found.values()))
        checked = check_bytes(scene.source, {index: bytes(data) for index, data in found.items()})
        used = watch.cpu_seconds + after - before
        measured = Measurement(len(indices), total, watch.seconds, used, checked)
        if tree.pid:
            measured.notes["bytes_from_device_per_byte"] = (read_after - read_before) / total
        return measured

    def _tree(self, environment: Environment) -> AbstractContextManager[Mounted]:
        scene = environment.scene
        if not self.server:
            return nullcontext(Mounted(scene.files, 0))
        point, log = scene.folder / "mnt", scene.folder / "mount.log"
        return mount_dlfs(str(scene.volume), point, log, self.server, memory_bytes=MEMORY_BYTES)


def _used(tree: Mounted) -> tuple[float, int]:
    """Return the CPU time of the tree's server, and the bytes that it has read from devices."""
    if not tree.pid:
        return 0.0, 0
    fields = dict(
        line.split(": ") for line in Path(f"/proc/{tree.pid}/io").read_text().splitlines()
    )
    return cpu_seconds_of(tree.pid), int(fields["read_bytes"])
