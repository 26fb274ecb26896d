"""Unchanged programs that go through a whole directory tree in its own order, with cold caches."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from bench.contenders.files import FileList
from bench.contenders.mounts import open_tree
from bench.errors import BenchmarkError
from bench.measurement import CHECKED, Environment, Measurement
from bench.resources import cpu_seconds_of_children, timed

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
        with open_tree(scene, "native" if self.mounted else "") as tree:
            environment.machine.require_cold()
            with timed(cpu_seconds_of_children, servers=tree.servers) as watch:
                ended = subprocess.run(["sh", "-c", COMMANDS[self.program], "walk", tree.files])
            if ended.returncode:
                raise BenchmarkError(f"{self.program} {tree.files}: exit code {ended.returncode}")
            order = scene.file_order(environment.round)[:CHECKED]
            checked = FileList(tree.files, scene.source, order).measure(CHECK_SECONDS).checked
        lengths = scene.source.lengths
        if not self.mounted:
            lengths = lengths[scene.file_indices]
        total = int(lengths.sum())
        return Measurement(len(lengths), total, watch.seconds, watch.cpu_seconds, checked)
