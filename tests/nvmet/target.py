"""The Linux kernel's NVMe/TCP target, which runs in a guest.

Namespaces are raw files of this machine behind virtio disks, so they outlive the guest. The target
listens on one port of 127.0.0.1, the same here and in the guest, and after a restart. Serial
numbers and UUIDs stay the same too; by default the kernel would generate new ones.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote
from uuid import NAMESPACE_URL, UUID, uuid5

from dlfs.base.units import MIB
from tests.nvmet.guest import Disk, Guest, free_port

_CONFIGFS = "/sys/kernel/config/nvmet"


@dataclass(frozen=True)
class Namespace:
    """One namespace of a subsystem.

    Attributes:
        path: path of the backing file, which several targets may share as paths to one namespace;
            None: a private file of the target. It contains zeros at first.
    """

    size_bytes: int = 32 * MIB
    block_bytes: int = 512
    path: Path | None = None


@dataclass(frozen=True)
class Keys:
    """The keys of a host, and what the target chooses for it.

    Attributes:
        host: key of the host, in its representation.
        controller: key of the controller; empty: the target does not prove its identity.
        hash: name of the hash, as in ``hmac(sha256)``.
        group: name of the Diffie-Hellman group.
    """

    host: str
    controller: str = ""
    hash: str = "sha256"
    group: str = "null"


@dataclass(frozen=True)
class Subsystem:
    """A subsystem with namespaces 1, 2, ...

    Attributes:
        hosts: NQNs of the hosts that may connect; empty: any may.
        keys: keys of these hosts, by NQN; a host without keys need not authenticate.
    """

    nqn: str
    namespaces: Sequence[Namespace] = (Namespace(),)
    hosts: Sequence[str] = ()
    keys: Mapping[str, Keys] = field(default_factory=dict)


def _write(path: str, value: object) -> str:
    return f"echo -n {shlex.quote(str(value))} >{shlex.quote(path)}"


def namespace_uuid(nqn: str, nsid: int) -> UUID:
    """Return the UUID of a namespace."""
    return uuid5(NAMESPACE_URL, f"{nqn}/{nsid}")


def tcp_uri(port: int, nqn: str, nsid: int, **options: object) -> str:
    """Return the device URI of a namespace of any target on 127.0.0.1."""
    query = "".join(f"&{key}={quote(str(value))}" for key, value in options.items())
    return f"nvme-tcp://127.0.0.1:{port}/{nqn}?nsid={nsid}{query}"


def _key_lines(host: str, keys: Keys) -> list[str]:
    lines = [
        _write(f"{host}/dhchap_hash", f"hmac({keys.hash})"),
        _write(f"{host}/dhchap_dhgroup", keys.group),
        _write(f"{host}/dhchap_key", keys.host),
    ]
    return [*lines, *([_write(f"{host}/dhchap_ctrl_key", keys.controller)] * bool(keys.controller))]


def _subsystem_lines(subsystem: Subsystem, first_disk: int, port: str) -> list[str]:
    base = f"{_CONFIGFS}/subsystems/{subsystem.nqn}"
    quoted = shlex.quote(base)
    lines = [
        f"mkdir {quoted}",
        _write(f"{base}/attr_allow_any_host", int(not subsystem.hosts)),
        _write(f"{base}/attr_serial", f"{zlib.crc32(subsystem.nqn.encode()):020d}"),
    ]
    for host in subsystem.hosts:
        known = shlex.quote(f"{_CONFIGFS}/hosts/{host}")
        lines += [f"mkdir -p {known}", f"ln -s {known} {quoted}/allowed_hosts/"]
        if host in subsystem.keys:
            lines += _key_lines(f"{_CONFIGFS}/hosts/{host}", subsystem.keys[host])
    for nsid in range(1, len(subsystem.namespaces) + 1):
        space = f"{base}/namespaces/{nsid}"
        disk = chr(ord("a") + first_disk + nsid - 1)
        lines += [
            f"mkdir {shlex.quote(space)}",
            _write(f"{space}/device_path", f"/dev/vd{disk}"),
            _write(f"{space}/device_uuid", namespace_uuid(subsystem.nqn, nsid)),
            _write(f"{space}/enable", 1),
        ]
    return [*lines, f"ln -s {quoted} {port}/subsystems/"]


def target_script(subsystems: Sequence[Subsystem], port: int, inline_bytes: int) -> str:
    """Return the shell script that configures the target; the first link opens the port."""
    base = f"{_CONFIGFS}/ports/1"
    lines = [
        "set -e",
        f"mkdir {base}",
        _write(f"{base}/addr_trtype", "tcp"),
        _write(f"{base}/addr_adrfam", "ipv4"),
        _write(f"{base}/addr_traddr", "127.0.0.1"),
        _write(f"{base}/addr_trsvcid", port),
        _write(f"{base}/param_inline_data_size", inline_bytes),
    ]
    disk = 0
    for subsystem in subsystems:
        lines += _subsystem_lines(subsystem, disk, base)
        disk += len(subsystem.namespaces)
    return "\n".join(lines) + "\n"


class KernelTarget:
    """A target with some subsystems, and the files behind their namespaces.

    Args:
        folder: existing, empty folder for its files.
        subsystems: subsystems with at most ``guest.DISKS`` namespaces in all.
        inline_bytes: most bytes that a host may write in a capsule.
    """

    def __init__(
        self, folder: Path, subsystems: Sequence[Subsystem], *, inline_bytes: int = 16384
    ) -> None:
        self.port = free_port()
        self._disks: dict[tuple[str, int], Disk] = {}
        for subsystem in subsystems:
            for number, namespace in enumerate(subsystem.namespaces, 1):
                path = namespace.path or folder / f"disk{len(self._disks)}"
                with path.open("ab") as file:
                    file.truncate(namespace.size_bytes)
                self._disks[subsystem.nqn, number] = Disk(path, namespace.block_bytes)
        script = target_script(subsystems, self.port, inline_bytes)
        self.guest = Guest(folder, script, disks=[*self._disks.values()], ports=[self.port])

    def uri(self, nqn: str, nsid: int = 1, **options: object) -> str:
        """Return the device URI of a namespace.

        Args:
            nqn: NQN of its subsystem, which need not exist.
            nsid: namespace ID, which need not exist.
            options: options of the URI, such as ``hdgst=1``.
        """
        return tcp_uri(self.port, nqn, nsid, **options)

    def disk(self, nqn: str, nsid: int = 1) -> Path:
        """Return the path of the file behind a namespace."""
        return self._disks[nqn, nsid].path

    def wipe(self, nqn: str, nsid: int = 1) -> None:
        """Fill the file of a namespace with zeros. The target does not cache it."""
        with self.disk(nqn, nsid).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            file.write(bytes(size))

    def start(self) -> None:
        """Start the target, for the first time or again, and wait until it serves."""
        self.guest.start()
        self.guest.wait_until_ready()

    def kill(self) -> None:
        """Kill the target, as a power cut would. Does nothing if it has ended."""
        self.guest.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()


@contextlib.contextmanager
def started(*targets: KernelTarget) -> Iterator[None]:
    """Start several targets at the same time, and end them after the ``with`` statement."""
    with contextlib.ExitStack() as ends:
        for target in targets:
            ends.enter_context(target.guest)
        for target in targets:
            target.guest.wait_until_ready()
        yield
