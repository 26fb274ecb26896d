"""jupyterhub_config.py of a hub whose servers are pods. See docs/jupyterhub.md."""

import sys

sys.path.insert(0, "/opt/dlfs/jupyterhub")
from dlfs_volumes import KubernetesVolumes, read_table

c = get_config()  # noqa: F821

VOLUMES = {
    "photos": {
        "uri": "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12",
        "groups": ["vision"],
        "memory": "4GiB",
    },
    "genomes": {
        "uri": "nvme-tcp://10.0.0.11/nqn.2024-01.org.example:genomes?nsid=1&dhchap_key=hub",
        "users": ["ann"],
        "secret": "dlfs-{username}",
        "memory": "1GiB",
    },
}
PROFILES = [
    {"display_name": "Small", "description": "all your volumes", "default": True},
    {
        "display_name": "Genomes, on a GPU",
        "dlfs_volumes": ["genomes"],
        "kubespawner_override": {"extra_resource_limits": {"nvidia.com/gpu": "1"}},
    },
]

KubernetesVolumes(read_table(VOLUMES)).configure(c, PROFILES)
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.JupyterHub.load_groups = {"vision": {"users": ["ann", "bob"]}}
c.Authenticator.allowed_users = {"ann", "bob"}
