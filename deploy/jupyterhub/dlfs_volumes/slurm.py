"""Volumes for servers that are jobs of Slurm, by batchspawner.

The hub puts commands before the server's in the job's script (``SlurmSpawner.req_prologue``). A job
runs as its user, so it reads volumes by the rights and the keys (``~/.config/dlfs/keys``) of that
user.
The table says what the hub offers; what protects a volume are its keys.

- Where Slurm's prolog has started a node service with a mount (``MOUNT=yes``, deploy/slurm), that
  mount is ``$DLFS_VOLUMES``.
- Elsewhere the job mounts each volume itself, and unmounts it at its end: ``volumes-in-job.sh``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .table import VARIABLE, TableError, Volume, volumes_of

SCRIPT = Path(__file__).resolve().parents[1] / "volumes-in-job.sh"
"""The commands of a job, at the same path on all nodes."""
WAIT_S = 20
"""Longest time for which a job waits for a volume, in seconds."""


class SlurmVolumes:
    """Mounts volumes in jobs of batchspawner's ``SlurmSpawner``, by a hook of JupyterHub.

    Args:
        volumes: from ``read_table``.
        script: path of ``volumes-in-job.sh`` on the nodes.
        dlfs: the program on the nodes, a name on the job's PATH or an absolute path.
        wait_s: longest time for which a job waits for a volume, in whole seconds.

    Raises:
        TableError: an argument is not what is expected.
    """

    def __init__(
        self,
        volumes: Sequence[Volume],
        *,
        script: str = str(SCRIPT),
        dlfs: str = "dlfs",
        wait_s: int = WAIT_S,
    ) -> None:
        if not os.path.isabs(script):
            raise TableError(f"Slurm volumes: script: expected an absolute path, got {script!r}")
        if not isinstance(wait_s, int) or wait_s < 1:
            raise TableError(f"Slurm volumes: wait_s: expected seconds from 1, got {wait_s!r}")
        self._volumes = list(volumes)
        self._script = script
        self._dlfs = dlfs
        self._wait_s = wait_s

    def configure(self, c: Any) -> None:
        """Set the hook in the configuration ``c`` of JupyterHub."""
        c.Spawner.pre_spawn_hook = self.on_start

    async def on_start(self, spawner: Any) -> None:
        """Put the commands for the user's volumes before those that the spawner has."""
        commands = self.prologue(volumes_of(self._volumes, spawner))
        spawner.req_prologue = f"{commands}{spawner.req_prologue}"
        # The steps of the job have only the variables that are named here.
        kept = [spawner.req_keepvars_extra] if spawner.req_keepvars_extra else []
        spawner.req_keepvars_extra = ",".join([*kept, VARIABLE])

    def prologue(self, volumes: Sequence[Volume]) -> str:
        """Return the commands of a job that mount volumes. Lines of a shell script."""
        lines = [f"DLFS={shlex.quote(self._dlfs)} DLFS_WAIT_S={self._wait_s}"]
        lines.append(f". {shlex.quote(self._script)}")
        for volume in volumes:
            memory = ["--memory", volume.memory] if volume.memory else []
            words = [volume.name, *memory, *volume.options, "--", volume.uri]
            lines.append(f"dlfs_volume {shlex.join(words)}")
        lines.append("dlfs_volumes_ready")
        return "".join(f"{line}\n" for line in lines)
