"""Volumes for servers that are pods, by kubespawner and the CSI driver of DLFS.

Each volume is an inline CSI volume of the pod. The hub makes the pod, so a user cannot name another
volume. Keys are in Secrets of the pod's namespace (``nodePublishSecretRef``), which the driver gets
and the pod does not.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from .table import VARIABLE, TableError, Volume, volumes_of

DIRECTORY = "/volumes"
"""Directory of the volumes in a pod."""
DRIVER = "csi.dlfs"
"""Name of the CSI driver."""

Profile = Mapping[str, Any]


class KubernetesVolumes:
    """Adds volumes to pods of ``KubeSpawner``.

    Args:
        volumes: from ``read_table``; their ``keys`` and ``options`` are not used.
        directory: directory of the volumes in a pod.
        driver: name of the CSI driver.

    Raises:
        TableError: an argument is not what is expected.
    """

    def __init__(
        self, volumes: Sequence[Volume], *, directory: str = DIRECTORY, driver: str = DRIVER
    ) -> None:
        if not os.path.isabs(directory):
            raise TableError(
                f"Kubernetes volumes: directory: expected an absolute path, got {directory!r}"
            )
        for volume in volumes:
            for key, value in (("keys", volume.keys), ("options", volume.options)):
                if value:
                    raise TableError(
                        f"volume {volume.name!r}: {key}: expected none for pods, got {value!r}; "
                        "'secret' names a Secret with keys"
                    )
        self._volumes = list(volumes)
        self._directory = directory.rstrip("/")
        self._driver = driver

    def configure(self, c: Any, profiles: Sequence[Profile] = ()) -> None:
        """Set what kubespawner needs in the configuration ``c`` of JupyterHub.

        Args:
            c: the configuration.
            profiles: entries of ``KubeSpawner.profile_list``, none for no choice. The key
                ``dlfs_volumes`` of an entry lists the volumes that its pods have, by name; only
                users who may read all of them see the entry. Without this key, pods have all
                volumes that the user may read.

        Raises:
            TableError: a profile names a volume that the table does not have.
        """
        if profiles:
            c.KubeSpawner.profile_list = self.profile_list(profiles)
        else:
            c.Spawner.pre_spawn_hook = self.on_start

    async def on_start(self, spawner: Any) -> None:
        """Add all volumes that the user may read to the pod of a spawner."""
        added = self.pod_settings(volumes_of(self._volumes, spawner))
        spawner.volumes = _joined(spawner.volumes, added["volumes"])
        spawner.volume_mounts = _joined(spawner.volume_mounts, added["volume_mounts"])
        spawner.environment = {**spawner.environment, **added["environment"]}

    def profile_list(
        self, profiles: Sequence[Profile]
    ) -> Callable[[Any], Awaitable[list[dict[str, Any]]]]:
        """Return what ``KubeSpawner.profile_list`` calls: the profiles for a user, with volumes.

        Args:
            profiles: as for ``configure``.
        """
        known = {volume.name for volume in self._volumes}
        for number, profile in enumerate(profiles):
            wanted = profile.get("dlfs_volumes", [])
            if isinstance(wanted, str) or not set(wanted) <= known:
                raise TableError(
                    f"profile {number} ({profile.get('display_name')!r}): dlfs_volumes: expected a "
                    f"list of {', '.join(sorted(known))}; got {wanted!r}"
                )

        async def profiles_of(spawner: Any) -> list[dict[str, Any]]:
            readable = {volume.name: volume for volume in volumes_of(self._volumes, spawner)}
            made = []
            for profile in profiles:
                wanted = profile.get("dlfs_volumes", list(readable))
                if set(wanted) <= set(readable):
                    settings = self.pod_settings([readable[name] for name in wanted])
                    made.append(_with_settings(profile, settings, spawner))
            return made

        return profiles_of

    def pod_settings(self, volumes: Sequence[Volume]) -> dict[str, dict[str, Any]]:
        """Return the traits of a ``KubeSpawner`` that give its pod volumes.

        Returns:
            ``volumes``, ``volume_mounts`` and ``environment``.
        """
        return {
            "volumes": {f"dlfs-{volume.name}": self._pod_volume(volume) for volume in volumes},
            "volume_mounts": {
                f"dlfs-{volume.name}": {
                    "name": f"dlfs-{volume.name}",
                    "mountPath": f"{self._directory}/{volume.name}",
                    "readOnly": True,
                }
                for volume in volumes
            },
            "environment": {VARIABLE: self._directory},
        }

    def _pod_volume(self, volume: Volume) -> dict[str, Any]:
        attributes = {"volumes": volume.uri, **volume.attributes}
        if volume.memory is not None:
            attributes["memory"] = volume.memory
        source: dict[str, Any] = {"driver": self._driver, "readOnly": True}
        source["volumeAttributes"] = {key: _literal(text) for key, text in attributes.items()}
        if volume.secret is not None:
            source["nodePublishSecretRef"] = {"name": volume.secret}
        return {"name": f"dlfs-{volume.name}", "csi": source}


def _with_settings(
    profile: Profile, settings: Mapping[str, dict[str, Any]], spawner: Any
) -> dict[str, Any]:
    """Return a profile whose pods have further settings, next to those that the spawner has."""
    made = deepcopy({key: value for key, value in profile.items() if key != "dlfs_volumes"})
    override = made.setdefault("kubespawner_override", {})
    for trait, added in settings.items():
        # A dict is merged by kubespawner with what the spawner has, a list replaces it.
        override[trait] = _joined(override.get(trait, getattr(spawner, trait)), added)
    return made


def _literal(text: str) -> str:
    """Return a text in which kubespawner finds no names in braces to replace."""
    return text.replace("{", "{{").replace("}", "}}")


def _joined(
    present: Mapping[str, Any] | Sequence[Any], added: Mapping[str, Any]
) -> dict[str, Any] | list[Any]:
    """Return a trait of kubespawner, a dict or a list, with further entries, each of them once."""
    if isinstance(present, Mapping):
        return {**present, **added}
    return [*(each for each in present if each not in added.values()), *added.values()]
