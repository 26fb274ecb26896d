"""Files that are opened, read and closed through FUSE.

The file systems are DLFS's mount, and an image of the same files served by squashfuse.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.contenders.files import FileList, programs_label
from bench.datasets import Scene
from bench.measurement import Environment, Measurement
from bench.process import find_program, output_of
from bench.resources import cpu_seconds_of
from bench.serving import (
    MEMORY_BYTES,
    SQUASHFUSE,
    Mounted,
    check_fuse,
    mount_dlfs,
    mount_squashfuse,
)

WARM_UP_SECONDS = 600.0
"""Most time of the first pass over the files, which is not timed."""

UNCOMPRESSED = ("-noappend", "-quiet", "-no-progress", "-noI", "-noD", "-noF", "-noX")
"""Options of mksquashfs: unpacking files is not to be measured."""

SERVERS = {
    "native": "DLFS mount, native",
    "uring": "DLFS mount, io_uring",
    "squashfuse": SQUASHFUSE,
}
"""Names of the servers in tables."""

STATES = {"cold": "cold", "served": "from its memory", "warm": "warm"}
"""States of the caches before a run, and their names in tables."""


def open_tree(
    scene: Scene, server: str, *, memory_bytes: int = MEMORY_BYTES
) -> AbstractContextManager[Mounted]:
    """Return a scene's files: through a mount by a server of DLFS, or plain if it is empty."""
    if not server:
        return nullcontext(Mounted(scene.files, 0))
    point, log = scene.folder / "mnt", scene.folder / "mount.log"
    return mount_dlfs(str(scene.volume), point, log, server, memory_bytes)


def _mount_image(environment: Environment, point: Path) -> AbstractContextManager[Mounted]:
    """Mount an uncompressed image of all files by squashfuse; make it on first use."""
    image = environment.scene.folder / "files.squashfs"
    mksquashfs = find_program("mksquashfs", "squashfs-tools")
    find_program(SQUASHFUSE, "squashfuse")
    if not image.exists():
        output_of(mksquashfs, environment.scene.files, image, *UNCOMPRESSED)
        environment.machine.require_cold()
    return mount_squashfuse(image, point)


@dataclass(frozen=True)
class MountFiles:
    """Random files through a mount: open, read and close, one at a time by each program.

    Attributes:
        server: ``native`` or ``uring``: the server of DLFS (`mount_dlfs`). ``squashfuse``: an image
            of the files.
        state: ``cold``: neither kernel nor server has cached anything. ``served``: the server has
            the samples in its memory, the kernel has cached nothing. ``warm``: all files were read
            once before.
        programs: number of processes that read at the same time.
    """

    server: str
    state: str
    programs: int = 1

    @property
    def label(self) -> str:
        return f"{SERVERS[self.server]}, {STATES[self.state]}{programs_label(self.programs)}"

    def run(self, environment: Environment) -> Measurement:
        check_fuse()
        point = environment.scene.folder / "mnt"
        point.mkdir(exist_ok=True)
        scene, limits = environment.scene, environment.limits
        order = scene.file_order(environment.round)[: limits.mount_files * self.programs]
        environment.machine.require_cold(cold=self.state == "cold")
        with self._mounted(environment, point) as mounted:
            files = FileList(mounted.files, scene.source, order)
            if self.state != "cold":
                files.read(WARM_UP_SECONDS)
            environment.machine.require_cold(cold=self.state == "served")
            before = cpu_seconds_of(mounted.pid)
            found = files.measure_programs(limits.seconds, self.programs)
            served = cpu_seconds_of(mounted.pid) - before
        found.cpu_seconds += served
        found.notes["server_cpu_seconds"] = served
        return found

    def _mounted(self, environment: Environment, point: Path) -> AbstractContextManager[Mounted]:
        if self.server == "squashfuse":
            return _mount_image(environment, point)
        return open_tree(environment.scene, self.server)
