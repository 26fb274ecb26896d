"""A virtual machine that runs one shell script on Debian's kernel, under software emulation.

``Guest`` is the machine: started in about three seconds, killed as by a power cut, silenced and
resumed, started again with the same disks. Its disks are raw files of this machine, which outlive
it. ``run_in_guest(script)`` starts one, runs a script as root with busybox's tools and nvmet's
modules loaded, and returns the exit code and the output. It tests code that needs a real kernel,
such as recipes that go through configfs.

A guest reaches ports of 127.0.0.1 on this machine at 10.0.2.2, and no other address outside. QEMU
accepts forwarded connections before the guest does: ``wait_until_ready`` waits until the
script has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.nvmet.initrd import build_initrd
from tests.nvmet.kernel import find_kernel
from tests.support.stopping import stop_process

HOST_ADDRESS = "10.0.2.2"
"""Address of this machine in a guest."""
START_SECONDS_MAX = 120
STARTS_MAX = 3
"""Most starts of a guest whose kernel panics before the script runs: emulated code that the kernel
changes as it starts is executed wrongly now and then."""
MEMORY_MIB = 256
WITH_ITS_STARTER = ("setpriv", "--pdeathsig", "KILL")
PORTS = range(15000, 16000)
"""Below the range that the kernel gives to outgoing connections: while a target is down, none of
them takes its port, nor does a reconnecting initiator meet itself there."""

_WORDS = (
    "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off audit=0 lsm= nokaslr no_timer_check "
    "random.trust_cpu=on initcall_blacklist=jent_mod_init,bpf_tcp_ca_kfunc_init,"
    "bpf_dummy_struct_ops_init,load_system_certificate_list,init_encrypted"
)
"""Kernel parameters of a guest.

They leave out the self-tests and keys that take seconds under emulation, and the check that timer
interrupts arrive within ten ticks: on a busy machine they come late, and the kernel panics
("IO-APIC + timer doesn't work!").
"""
_EXIT = re.compile(rb"\nGUEST-EXIT (\d+)\n\Z")


class GuestError(Exception):
    """A guest did not start, or its script failed."""


@dataclass(frozen=True)
class Disk:
    """A virtio disk, /dev/vda and so on in the guest: a raw file."""

    path: Path
    block_bytes: int = 512


@dataclass(frozen=True)
class GuestResult:
    """The exit code and output of a script."""

    code: int
    output: str


_turns = itertools.count(os.getpid() * 7)


def free_port() -> int:
    """Return a free port of 127.0.0.1, another one at each call."""
    for turn in itertools.islice(_turns, len(PORTS)):
        port = PORTS[turn % len(PORTS)]
        with contextlib.closing(socket.socket()) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise GuestError(f"no free port in {PORTS}")


class Guest:
    """One virtual machine.

    Args:
        folder: existing, empty folder for its files.
        script: script for busybox's shell, run once the network is up.
        files: additional files of the guest's root folder, by name.
        disks: at most 20 disks, whose files exist.
        ports: forwarded ports of 127.0.0.1, here and in the guest.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        files: Mapping[str, bytes] | None = None,
        disks: Sequence[Disk] = (),
        ports: Sequence[int] = (),
    ) -> None:
        kernel = find_kernel()
        if kernel is None:
            raise GuestError("there is no guest kernel")
        self.folder = folder
        self.disks = tuple(disks)
        self.ports = tuple(ports)
        self._vmlinux = kernel.vmlinux
        initrd = build_initrd(kernel, {"script": script.encode(), **(files or {})})
        (folder / "initrd").write_bytes(initrd)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    # ---- starting --------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{p}-127.0.0.1:{p}" for p in self.ports)
        command = [
            *("qemu-system-x86_64", "-M", "q35", "-accel", "tcg", "-m", str(MEMORY_MIB)),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-serial", f"file:{self.folder}/console", "-serial", f"file:{self.folder}/output"),
            *("-kernel", str(self._vmlinux), "-initrd", f"{self.folder}/initrd"),
            *("-append", _WORDS),
            *("-netdev", f"user,id=net{forwards}"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
        ]
        for number, disk in enumerate(self.disks):
            # Not locked: several guests may share a disk, as controllers of one namespace.
            file = f"file={disk.path},format=raw,file.locking=off"
            size = f"logical_block_size={disk.block_bytes},physical_block_size={disk.block_bytes}"
            command += [
                *("-drive", f"if=none,id=disk{number},{file}"),
                *("-device", f"virtio-blk-pci,drive=disk{number},{size}"),
            ]
        return command

    def start(self) -> None:
        """Start the machine, for the first time or again; ``wait_until_ready`` comes next.

        Threads: it ends with the thread that starts it, so that a test run that is killed leaves
        none behind.
        """
        assert self._process is None or self._process.poll() is not None, "the guest is running"
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        for name in ("console", "output"):
            (self.folder / name).unlink(missing_ok=True)
        with (self.folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*WITH_ITS_STARTER, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for_script(self) -> GuestResult:
        """Wait until the script has ended.

        Raises:
            GuestError: the machine ended before it, or took too long.
        """
        assert self._process is not None
        output = self.folder / "output"
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            ended = self._process.poll() is not None
            content = output.read_bytes() if output.exists() else b""
            if found := _EXIT.search(content):
                output = content[: found.start()].decode("utf-8", "replace")
                return GuestResult(int(found[1]), output)
            if ended and not content and self._starts < STARTS_MAX and self._has_panicked():
                self._start()
                continue
            if ended or time.monotonic() > deadline:
                raise GuestError(f"the guest {'ended' if ended else 'hangs'}:\n{self.report()}")
            select.select([], [], [], 0.02)

    def wait_until_ready(self) -> None:
        """Wait until the script has succeeded.

        Raises:
            GuestError: it failed, or did not end.
        """
        if self.wait_for_script().code != 0:
            raise GuestError(f"the guest's script failed:\n{self.report()}")

    def _has_panicked(self) -> bool:
        console = self.folder / "console"
        return console.exists() and b"Kernel panic" in console.read_bytes()

    def report(self) -> str:
        """Return the output of the guest and QEMU, for error messages."""
        names = ("qemu.log", "console", "output")
        found = [self.folder / name for name in names if (self.folder / name).exists()]
        return "\n".join(path.read_text("utf-8", "replace") for path in found)

    # ---- ending and silence ----------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True if the machine runs or is paused."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the machine, as a power cut would. Does nothing if it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Pause the machine: connections stay open, but nothing is answered."""
        assert self._process is not None
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Undo ``pause``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()


def run_in_guest(
    script: str,
    *,
    files: Mapping[str, bytes] | None = None,
    disks: Sequence[Disk] = (),
    ports: Sequence[int] = (),
) -> GuestResult:
    """Run a shell script in a new guest, and end the guest.

    Args:
        script: run as root, in /tmp. It finds busybox's tools, nvmet-tcp and nvme-tcp loaded,
            configfs mounted, and 64-MiB RAM disks /dev/ram0 and /dev/ram1. An exit code other than
            0 is no error here.
        files: additional executable files of the guest's root folder, by name.
        disks: disks of the guest.
        ports: forwarded ports of 127.0.0.1, here and in the guest.

    Raises:
        GuestError: the guest did not start, or the script did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        guest = Guest(Path(folder), script, files=files, disks=disks, ports=ports)
        with guest:
            return guest.wait_for_script()
