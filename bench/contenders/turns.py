"""Large files that are read in turns, a piece of each, with cold caches."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.contenders.mounts import SERVERS, open_tree
from bench.measurement import Environment, Measurement, check_bytes
from bench.resources import timed
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
        with (
            open_tree(scene, self.server, memory_bytes=MEMORY_BYTES) as tree,
            ExitStack() as opened,
        ):
            files = {}
            for index in indices:
                path = Path(tree.files) / os.fsdecode(scene.source.path(index))
                files[index] = opened.enter_context(path.open("rb", buffering=0))
            environment.machine.require_cold()
            read_before = sum(map(_read_bytes, tree.servers))
            with timed(servers=tree.servers) as watch:
                for _ in range(0, int(scene.source.lengths.max()), PIECE_BYTES):
                    for index, file in files.items():
                        found[index] += file.read(PIECE_BYTES)
            read = sum(map(_read_bytes, tree.servers)) - read_before
        total = sum(map(len, found.values()))
        checked = check_bytes(scene.source, {index: bytes(data) for index, data in found.items()})
        measured = Measurement(len(indices), total, watch.seconds, watch.cpu_seconds, checked)
        if tree.servers:
            measured.notes["bytes_from_device_per_byte"] = read / total
        return measured


def _read_bytes(pid: int) -> int:
    """Return the bytes that a process has read from devices."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
