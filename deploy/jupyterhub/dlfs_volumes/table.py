"""The table of volumes: which there are, and who may read each."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

VARIABLE = "DLFS_VOLUMES"
"""Environment variable of a server: the directory of its volumes."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_NAME_WORDS = "1 to 42 small letters, digits and inner hyphens"
_SIZE = re.compile(r"[1-9][0-9]*(KiB|MiB|GiB|TiB)")


class TableError(ValueError):
    """An entry of the table, or an argument, is not what is expected. The hub does not start."""

    @property
    def jupyterhub_message(self) -> str:
        """Text that JupyterHub shows to the user if the start of a server fails."""
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A volume and those who may read it.

    Attributes:
        name: name of its directory in ``$DLFS_VOLUMES``: small letters, digits and inner hyphens,
            at most 42.
        uri: URIs of its members, or absolute paths, joined by commas.
        users: names of JupyterHub users who may read it.
        groups: names of JupyterHub groups whose members may read it.
        everyone: True if every user of the hub may.
        memory: memory for samples (``dlfs mount --memory``), such as ``4GiB``; None for the default
            of ``dlfs mount``.
        options: further options of ``dlfs mount``, for local and Slurm spawners.
        attributes: further attributes of the CSI volume, for pods, such as ``podMemory``.
        keys: directory of the keys that the URI names, for the local spawner: of mode 0700, of root
            or the account that mounts. None for the default of ``dlfs``.
        secret: name of the Kubernetes Secret with the keys; kubespawner replaces ``{username}`` in
            it. None if the volume needs none.
    """

    name: str
    uri: str
    users: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    everyone: bool = False
    memory: str | None = None
    options: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict, hash=False)
    keys: str | None = None
    secret: str | None = None


def read_table(table: Mapping[str, Mapping[str, Any]]) -> list[Volume]:
    """Check the table of volumes in ``jupyterhub_config.py``, and return its volumes.

    Args:
        table: of each volume's name its entry, with the attributes of ``Volume`` as keys. ``uri``
            and one of ``users``, ``groups`` and ``everyone`` must be there.

    Raises:
        TableError: an entry is not as expected.
    """
    if not isinstance(table, Mapping):
        raise TableError(f"read the table of volumes: expected a dict of entries, got {table!r}")
    return [_read_entry(name, entry) for name, entry in table.items()]


def readable_volumes(volumes: Iterable[Volume], user: str, groups: Iterable[str]) -> list[Volume]:
    """Return the volumes that a user may read.

    Args:
        volumes: all volumes.
        user: the name of the user.
        groups: names of the user's JupyterHub groups.
    """
    names = frozenset(groups)
    return [v for v in volumes if v.everyone or user in v.users or v.groups & names]


def volumes_of(volumes: Iterable[Volume], spawner: Any) -> list[Volume]:
    """Return the volumes that the user of a spawner may read."""
    user = spawner.user
    return readable_volumes(volumes, user.name, [group.name for group in user.groups])


def _read_entry(name: object, entry: object) -> Volume:
    where = f"volume {name!r}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TableError(f"{where}: expected a name of {_NAME_WORDS}, got {name!r}")
    if not isinstance(entry, Mapping):
        raise TableError(
            f"{where}: expected a dict with 'uri' and 'users' or 'groups', got {entry!r}"
        )
    known = [each.name for each in fields(Volume) if each.name != "name"]
    for key in entry:
        if key not in known:
            raise TableError(f"{where}: expected keys of {', '.join(known)}; got {key!r}")
    volume = Volume(
        name=name,
        uri=_text(where, entry, "uri") or "",
        users=frozenset(_texts(where, entry, "users")),
        groups=frozenset(_texts(where, entry, "groups")),
        everyone=_truth(where, entry, "everyone"),
        memory=_text(where, entry, "memory"),
        options=tuple(_texts(where, entry, "options")),
        attributes=_pairs(where, entry, "attributes"),
        keys=_text(where, entry, "keys"),
        secret=_text(where, entry, "secret"),
    )
    _check_volume(where, volume)
    return volume


def _check_volume(where: str, volume: Volume) -> None:
    if not volume.uri:
        raise TableError(f"{where}: expected 'uri', the URIs of its members; got none")
    for member in volume.uri.split(","):
        # Mounts start in other directories, and on other machines.
        if "://" not in member and not member.startswith("/"):
            raise TableError(
                f"{where}: uri: expected URIs or absolute paths, joined by commas; got {member!r}"
            )
    if not (volume.users or volume.groups or volume.everyone):
        raise TableError(
            f"{where}: expected names in 'users' or 'groups', or 'everyone': True; got none, so "
            "that nobody could read it"
        )
    if volume.memory is not None and not _SIZE.fullmatch(volume.memory):
        raise TableError(f"{where}: memory: expected a size such as 4GiB, got {volume.memory!r}")


def _text(where: str, entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value or not value.isprintable():
        raise TableError(f"{where}: {key}: expected a line of text, got {value!r}")
    return value


def _texts(where: str, entry: Mapping[str, Any], key: str) -> list[str]:
    value = entry.get(key, [])
    is_list = isinstance(value, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(each, str) and each for each in value):
        raise TableError(f"{where}: {key}: expected a list of names, got {value!r}")
    return list(value)


def _pairs(where: str, entry: Mapping[str, Any], key: str) -> dict[str, str]:
    value = entry.get(key, {})
    is_dict = isinstance(value, Mapping)
    if not is_dict or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise TableError(f"{where}: {key}: expected a dict of texts, got {value!r}")
    return dict(value)


def _truth(where: str, entry: Mapping[str, Any], key: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise TableError(f"{where}: {key}: expected True or False, got {value!r}")
    return value


def check_keys(volume: Volume, owners: set[int]) -> None:
    """Check that only the account that mounts can read the directory of keys of a volume.

    Args:
        volume: the volume.
        owners: IDs of the users to whom it may belong.

    Raises:
        TableError: there is no such directory, or others may read it.
    """
    if volume.keys is None:
        return
    where = f"volume {volume.name!r}: keys"
    try:
        found = os.stat(volume.keys)
    except OSError as error:
        raise TableError(
            f"{where}: expected a directory of keys, got {volume.keys}: {error.strerror}"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or mode & 0o077 or found.st_uid not in owners:
        raise TableError(
            f"{where}: expected a directory of mode 0700 of the account that mounts, got "
            f"{volume.keys} of user {found.st_uid} with mode {mode:04o}"
        )
