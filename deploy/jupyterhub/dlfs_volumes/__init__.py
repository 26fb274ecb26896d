"""Gives the servers of a JupyterHub the DLFS volumes that their users may read.

``jupyterhub_config.py`` has a table of volumes, of the users and of JupyterHub groups that may read
each. ``read_table`` checks it when the hub starts. One class for each kind of spawner sets the
hooks of JupyterHub (``Spawner.pre_spawn_hook``, ``Spawner.post_stop_hook``) by ``configure(c)``:

- ``LocalVolumes``: servers are processes of the hub's machine. The hub mounts a volume once for
  all users, and binds it into a directory of each user who may read it.
- ``SlurmVolumes``: servers are jobs of batchspawner. The job mounts the volumes, by the rights and
  keys of its user, or finds those that Slurm's prolog has mounted.
- ``KubernetesVolumes``: servers are pods of kubespawner, with one CSI volume for each volume.

A server finds its volumes in the directory ``$DLFS_VOLUMES``, each by its name in the table. The
rights hold from the next start of a server. The package imports neither
DLFS nor JupyterHub, and needs Python 3.11; see docs/jupyterhub.md.
"""

from .kubernetes import KubernetesVolumes
from .local import LocalVolumes
from .messages import VolumeProgress
from .slurm import SlurmVolumes
from .table import TableError, Volume, read_table, readable_volumes

__all__ = [
    "KubernetesVolumes",
    "LocalVolumes",
    "SlurmVolumes",
    "TableError",
    "Volume",
    "VolumeProgress",
    "read_table",
    "readable_volumes",
]
