"""jupyterhub_config.py of a hub whose servers are processes of its machine: docs/jupyterhub.md."""

import sys

from jupyterhub.spawner import LocalProcessSpawner

sys.path.insert(0, "/opt/dlfs/jupyterhub")
from dlfs_volumes import LocalVolumes, VolumeProgress, read_table

c = get_config()  # noqa: F821

VOLUMES = {
    "photos": {
        "uri": "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12",
        "groups": ["vision"],
        "memory": "16GiB",
    },
    "genomes": {
        "uri": "nvme-tcp://10.0.0.11/nqn.2024-01.org.example:genomes?nsid=1&dhchap_key=hub",
        "users": ["ann"],
        "keys": "/etc/dlfs/keys",
        "memory": "4GiB",
    },
}


class Spawner(VolumeProgress, LocalProcessSpawner):
    """Servers whose start shows on its page which volumes they get."""


LocalVolumes(read_table(VOLUMES), dlfs="/opt/dlfs/bin/dlfs").configure(c)
c.JupyterHub.spawner_class = Spawner
c.JupyterHub.load_groups = {"vision": {"users": ["ann", "bob"]}}
c.Authenticator.allowed_users = {"ann", "bob"}
