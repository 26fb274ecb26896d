"""Unchanged programs that go through a whole directory tree in its own order, with cold caches."""

from __future__ import annotations

import resource
import subprocess
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from bench.contenders.files import FileList
from bench.errors import BenchmarkError
from bench.measurement import CHECKED, Environment, Measurement
from bench.resources import cpu_seconds, cpu_seconds_of, timed
from bench.serving import Mounted, mount_dlfs

COMMANDS = {
    # To a pipe, because tar reads no files for an archive in /dev/null.
    "tar c": 'tar c -C "$1" . | cat >/dev/null',
    "grep -r": 'grep -r --quiet --fixed-strings "nothing has this text" "$1" || [ $? = 1 ]',
}
"""Shell commands by the program's name; the argument is the folder."""

CHECK_SECONDS = 60.0
"""Most time of reading the files whose bytes are compared; not measured."""


@dataclass(frozen=True)
class Walk:
    """A program that reads every file below a folder, once, after all caches were dropped.

    Attributes:
        program: key of `COMMANDS`.
        mounted: through DLFS's native mount; else plain files.
    """

    program: str
    mounted: bool

    @property
    def label(self) -> str:
        where = "DLFS mount, native" if self.mounted else "plain files"
        return f"{where}, cold, {self.program}"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        with self._tree(environment) as tree:
            environment.machine.require_cold()
            before = _cpu_seconds(tree)
            with timed() as watch:
                ended = subprocess.run(["sh", "-c", COMMANDS[self.program], "walk", tree.files])
            used = _cpu_seconds(tree) - before
            if ended.returncode:
                raise BenchmarkError(f"{self.program} {tree.files}: exit code {ended.returncode}")
            order = scene.file_order(environment.round)[:CHECKED]
            checked = FileList(tree.files, scene.source, order).measure(CHECK_SECONDS).checked
        lengths = scene.source.lengths
        if not self.mounted:
            lengths = lengths[scene.file_indices]
        return Measurement(len(lengths), int(lengths.sum()), watch.seconds, used, checked)

    def _tree(self, environment: Environment) -> AbstractContextManager[Mounted]:
        scene = environment.scene
        if not self.mounted:
            return nullcontext(Mounted(scene.files, 0))
        return mount_dlfs(
            str(scene.volume), scene.folder / "mnt", scene.folder / "mount.log", "native"
        )


def _cpu_seconds(tree: Mounted) -> float:
    """Return the CPU time of the children that have ended and of the tree's server."""
    children = cpu_seconds(resource.RUSAGE_CHILDREN)
    return children + (cpu_seconds_of(tree.pid) if tree.pid else 0.0)
