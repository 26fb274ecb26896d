"""A virtual machine that runs one shell script on Debian's kernel, under software emulation.

``Guest`` is the machine: started in less than a second, killed as by a power cut, silenced and
resumed, started again with the same disks. Its disks are raw files of this machine, which outlive
it. ``run_in_guest(script)`` starts one, runs a script as root with busybox's tools and nvmet's
modules loaded, and returns the exit code and the output. It tests code that needs a real kernel,
such as recipes that go through configfs.

A test process boots one machine and stores it with its kernel, modules and network; all guests go
on from there. They get their files by TFTP, and their disks when they load the driver.

A guest reaches ports of 127.0.0.1 on this machine at 10.0.2.2, and no other address outside. QEMU
accepts forwarded connections before the guest does: ``wait_until_ready`` waits until the
script has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tarfile
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
BOOTS_MAX = 3
"""Most boots until one succeeds: emulated code that the kernel changes as it starts is executed
wrongly now and then, and the kernel panics."""
DISKS = 4
"""Disks of every guest: those that it does not use are empty."""
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
_BOOTED = b"GUEST-BOOTED\n"
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


def _command(folder: Path, network: str, disks: Sequence[Disk]) -> list[str]:
    """Return the command that starts a machine; those of all machines have the same devices."""
    command = [
        *("qemu-system-x86_64", "-M", "q35", "-accel", "tcg", "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-serial", f"file:{folder}/console", "-serial", f"file:{folder}/output"),
        *("-netdev", f"user,id=net{network}"),
        *("-device", "virtio-net-pci,netdev=net,romfile="),
    ]
    for number in range(DISKS):
        file, device = "driver=null-co,size=512", f"virtio-blk-pci,drive=disk{number}"
        if number < len(disks):
            # Not locked: several guests may share a disk, as controllers of one namespace.
            file = f"file={disks[number].path},format=raw,file.locking=off"
            size = disks[number].block_bytes
            device += f",logical_block_size={size},physical_block_size={size}"
        command += ["-drive", f"if=none,id=disk{number},{file}", "-device", device]
    return command


@functools.cache
def _booted() -> Path:
    """Boot a machine and store it; returns the folder of its file ``machine``.

    Raises:
        GuestError: it did not boot.
    """
    kernel = find_kernel()
    if kernel is None:
        raise GuestError("there is no guest kernel")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    (folder / "initrd").write_bytes(build_initrd(kernel))
    booting = ("-kernel", str(kernel.vmlinux), "-initrd", f"{folder}/initrd", "-append", _WORDS)
    output = folder / "output"
    for _ in range(BOOTS_MAX):
        with subprocess.Popen(
            [*WITH_ITS_STARTER, *_command(folder, "", ()), *booting, "-monitor", "stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as machine:
            deadline = time.monotonic() + START_SECONDS_MAX
            while machine.poll() is None and time.monotonic() < deadline:
                if output.exists() and _BOOTED in output.read_bytes():
                    machine.communicate(f'migrate "exec:cat >{folder}/machine"\nquit\n')
                    return folder
                select.select([], [], [], 0.02)
            machine.kill()
    raise GuestError(f"the guest does not boot:\n{(folder / 'console').read_text()}")


class Guest:
    """One virtual machine.

    Args:
        folder: existing, empty folder for its files.
        script: script for busybox's shell, run once the network is up.
        files: additional files of the guest's root folder, by name.
        disks: at most ``DISKS`` disks, whose files exist.
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
        self.folder = folder
        self.disks = tuple(disks)
        self.ports = tuple(ports)
        with tarfile.open(folder / "files", "w") as archive:
            for name, data in {"script": script.encode(), **(files or {})}.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o755
                archive.addfile(member, io.BytesIO(data))
        self._process: subprocess.Popen[bytes] | None = None

    # ---- starting --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the machine, for the first time or again; ``wait_until_ready`` comes next.

        Threads: it ends with the thread that starts it, so that a test run that is killed leaves
        none behind.
        """
        assert self._process is None or self._process.poll() is not None, "the guest is running"
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{p}-127.0.0.1:{p}" for p in self.ports)
        command = _command(self.folder, f",tftp={self.folder}{forwards}", self.disks)
        for name in ("console", "output"):
            (self.folder / name).unlink(missing_ok=True)
        with (self.folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*WITH_ITS_STARTER, *command, "-incoming", f"exec:cat {_booted()}/machine"],
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
