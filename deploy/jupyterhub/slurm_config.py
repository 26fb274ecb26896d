"""jupyterhub_config.py of a hub whose servers are jobs of Slurm. See docs/jupyterhub.md."""

import sys

import batchspawner  # noqa: F401  its handler tells the hub the port of a server

sys.path.insert(0, "/opt/dlfs/jupyterhub")
from dlfs_volumes import SlurmVolumes, read_table

c = get_config()  # noqa: F821

VOLUMES = {
    "photos": {
        "uri": "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12",
        "groups": ["vision"],
        "memory": "4GiB",
    },
}

SlurmVolumes(read_table(VOLUMES), dlfs="/opt/dlfs/bin/dlfs").configure(c)
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.JupyterHub.hub_ip = "10.0.0.1"
c.JupyterHub.load_groups = {"vision": {"users": ["ann", "bob"]}}
c.SlurmSpawner.req_memory = "16G"
c.Authenticator.allowed_users = {"ann", "bob"}
