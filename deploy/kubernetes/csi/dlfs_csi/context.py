"""Attributes and access mode of a volume, as a call gives them, and the options of its mount.

A PersistentVolume or a pod gives ``volumeAttributes``; Kubernetes adds keys of its own, which say
whose pod asks. Every other key must be one of ``KEYS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlfs.base.units import parse_bytes
from dlfs.base.wording import close_matches
from dlfs.block import parse_uri, split_members
from dlfs.errors import LimitError, UsageError
from dlfs.format.names import dataset_name_bytes
from dlfs.mount.options import BUSY_POLL_US_MAX
from dlfs.service.published import NOTE_MAX
from dlfs_csi.failures import CallError, Code
from dlfs_csi.wire import Mode

FOREIGN_PREFIXES = ("csi.storage.k8s.io/", "storage.kubernetes.io/")
"""Beginnings of the keys that Kubernetes adds. One of them has tokens, so none is stored."""

EPHEMERAL = "csi.storage.k8s.io/ephemeral"
FILES, SERVICE = "files", "service"
"""Values of the attribute ``access``: a mount with the samples, or a socket of the node service."""
READERS = (Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY)
VOLUMES_MAX = 16
"""Most volumes of one mount."""
ID_BYTES_MAX = 4096
"""Longest identifier of a volume, in bytes; Kubernetes composes them of its own names."""

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True)
class MountSpec:
    """The volumes of a mount and its options, from the attributes of a volume.

    Attributes:
        volumes: the volumes, each as the URIs of its members, joined by commas.
        access: ``FILES`` or ``SERVICE``.
        dataset: the dataset whose directory is shown; empty: the whole mount.
        memory_bytes: memory for samples, in bytes; 0: the server's default.
        uid: owner of the files; None: the user that the server runs as. ``gid`` likewise.
        mode: permissions of files, in octal.
        nested: show a volume in a directory of its own also if it is the only one.
        busy_poll_us: busy polling of the server, in microseconds; None: its default.
        pod_memory: memory limit of the server's pod, as Kubernetes writes quantities; empty: that
            of the driver. ``pod_memory_request``, ``pod_cpu`` and ``pod_cpu_request`` likewise.
    """

    volumes: tuple[str, ...]
    access: str = FILES
    dataset: str = ""
    memory_bytes: int = 0
    uid: int | None = None
    gid: int | None = None
    mode: str = "444"
    nested: bool = False
    busy_poll_us: int | None = None
    pod_memory: str = ""
    pod_memory_request: str = ""
    pod_cpu: str = ""
    pod_cpu_request: str = ""

    def arguments(self) -> list[str]:
        """Return the arguments of ``dlfs mount`` for its volumes and options."""
        words = ["--mode", self.mode]
        if self.memory_bytes:
            words += ["--memory", str(self.memory_bytes)]
        for option, value in (("--uid", self.uid), ("--gid", self.gid)):
            words += [] if value is None else [option, str(value)]
        if self.busy_poll_us is not None:
            words += ["--busy-poll-us", str(self.busy_poll_us)]
        if self.nested:
            words.append("--nested")
        return [*words, "--", *self.volumes]


def _volumes(text: str) -> tuple[str, ...]:
    volumes = tuple(filter(None, map(str.strip, text.splitlines())))
    if not 1 <= len(volumes) <= VOLUMES_MAX:
        raise UsageError(f"expected 1 to {VOLUMES_MAX} lines, a volume each, got {len(volumes)}")
    for volume in volumes:
        for member in split_members(volume):
            parse_uri(member)
    return volumes


def _access(text: str) -> str:
    if text not in (FILES, SERVICE):
        raise UsageError(f"expected {FILES!r} or {SERVICE!r}, got {text!r}")
    return text


def _dataset(text: str) -> str:
    dataset_name_bytes(text)
    return text


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            raise UsageError(f"expected an integer {low}..{high}, got {text!r}")
        return int(text)

    return parse


def _mode(text: str) -> str:
    if not re.fullmatch(r"0?[0-7]{3}", text) or int(text, 8) & ~0o555:
        raise UsageError(
            f"expected octal digits of read and execute bits such as 444, got {text!r}"
        )
    return text


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"expected 'true' or 'false', got {text!r}")
    return text == "true"


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise UsageError(f"expected a quantity such as 500m or 2Gi, got {text!r}")
    return text


def _writers(text: str) -> str:
    if text not in ("refuse", "readOnly"):
        raise UsageError(f"expected 'refuse' or 'readOnly', got {text!r}")
    return text


KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "volumes": ("volumes", _volumes),
    "access": ("access", _access),
    "dataset": ("dataset", _dataset),
    "memory": ("memory_bytes", parse_bytes),
    "uid": ("uid", _integer(0, 2**32 - 2)),
    "gid": ("gid", _integer(0, 2**32 - 2)),
    "mode": ("mode", _mode),
    "nested": ("nested", _bool),
    "busyPollUs": ("busy_poll_us", _integer(0, BUSY_POLL_US_MAX)),
    "podMemory": ("pod_memory", _quantity),
    "podMemoryRequest": ("pod_memory_request", _quantity),
    "podCpu": ("pod_cpu", _quantity),
    "podCpuRequest": ("pod_cpu_request", _quantity),
    "writers": ("", _writers),
}
"""Attributes of a volume: the field of ``MountSpec``, and what parses the value."""
_OF_SERVICE = ("volumes", "access", "memory", "writers")


def own_attributes(context: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes without the keys that Kubernetes adds."""
    return {key: context[key] for key in sorted(context) if not key.startswith(FOREIGN_PREFIXES)}


def parse_attributes(context: Mapping[str, str]) -> MountSpec:
    """Parse the attributes of a volume.

    Raises:
        CallError: INVALID_ARGUMENT: a key is unknown or missing, or a value is wrong.
    """
    fields: dict[str, Any] = {}
    for key, text in own_attributes(context).items():
        if key not in KEYS:
            close = close_matches(key, list(KEYS), 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise invalid(f"attribute {key!r}: expected one of {', '.join(KEYS)}{hint}")
        field, parse = KEYS[key]
        try:
            fields[field] = parse(text)
        except (UsageError, LimitError) as error:
            raise invalid(f"attribute {key!r}: {error}") from error
    fields.pop("", None)
    if "volumes" not in fields:
        raise invalid("attribute 'volumes': expected the URIs of a volume's members, got none")
    spec = MountSpec(**fields)
    of_files = [key for key in own_attributes(context) if key not in _OF_SERVICE]
    if spec.access == SERVICE and of_files:
        raise invalid(
            f"attributes {', '.join(map(repr, of_files))}: expected none of them with access: "
            f"{SERVICE}; they are for access: {FILES}"
        )
    if spec.dataset and (spec.nested or len(spec.volumes) > 1):
        raise invalid("attribute 'dataset': expected one volume that is not nested with it")
    return spec


def check_capability(
    capability: Any, context: Mapping[str, str], *, readonly: bool | None = None
) -> None:
    """Check that a volume can be used as a call asks: as a file system, for reading.

    A mode that includes writers is taken if the mount is to be read-only (``readOnly`` of a pod's
    volume; inline volumes always have such a mode), or if the attribute ``writers`` is
    ``readOnly``: then a program that writes gets EROFS.

    Args:
        capability: a VolumeCapability.
        context: the attributes of the volume.
        readonly: the flag of NodePublishVolume; None for other calls.

    Raises:
        CallError: INVALID_ARGUMENT: it can not.
    """
    if capability.HasField("block"):
        raise invalid("volume_capability: expected access_type mount, got block")
    if not capability.HasField("mount"):
        raise invalid("volume_capability: expected access_type mount, got none")
    flags = [flag for flag in capability.mount.mount_flags if flag not in ("ro", "")]
    if flags:
        raise invalid(f"volume_capability: expected no mount flags but 'ro', got {flags[0]!r}")
    if capability.mount.fs_type not in ("", "dlfs", "fuse.dlfs"):
        got = capability.mount.fs_type
        raise invalid(f"volume_capability: expected fs_type 'dlfs' or none, got {got!r}")
    number = capability.access_mode.mode
    known = number in Mode.__members__.values()
    if number in READERS or (
        known and number != Mode.UNKNOWN and _is_for_reading(context, readonly)
    ):
        return
    got = Mode(number).name if known else str(number)
    raise invalid(
        f"volume_capability: expected access_mode {' or '.join(mode.name for mode in READERS)}, "
        f"got {got}; a mount is read-only: have accessModes ReadOnlyMany, or readOnly: true in the "
        "pod's volume, or the attribute writers: readOnly"
    )


def _is_for_reading(context: Mapping[str, str], readonly: bool | None) -> bool:
    return bool(readonly) or context.get("writers") == "readOnly"


def check_id(volume_id: str) -> None:
    """Check an identifier of a volume.

    Raises:
        CallError: INVALID_ARGUMENT: it is missing or too long.
    """
    if not volume_id:
        raise invalid("volume_id: expected an identifier, got none")
    if len(volume_id.encode()) > ID_BYTES_MAX:
        raise invalid(f"volume_id: expected at most {ID_BYTES_MAX} bytes")


def pod_note(context: Mapping[str, str]) -> str:
    """Return the pod that a call is for, as NAMESPACE/POD (SERVICEACCOUNT); empty if not told."""
    namespace, pod, account = (
        context.get(f"csi.storage.k8s.io/{key}", "")
        for key in ("pod.namespace", "pod.name", "serviceAccount.name")
    )
    text = f"{namespace}/{pod} ({account})" if pod else ""
    return "".join(c for c in text if c.isprintable())[:NOTE_MAX]


def invalid(message: str) -> CallError:
    """Return the failure of a wrong request."""
    return CallError(Code.INVALID_ARGUMENT, message)
