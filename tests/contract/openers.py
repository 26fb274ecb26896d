"""Openers of every kind of device, for the tests of their contract."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlfs.base.units import MIB
from dlfs.block import BlockDevice, FileDevice, MemoryDevice, open_device
from dlfs.block.lease import LeaseTimes
from dlfs.block.shared import SharedNamespaceDevice
from tests.nvmet.shared import OPEN
from tests.nvmet.target import KernelTarget
from tests.spdk import target as spdk
from tests.support.devices import FaultyDevice, RecordingDevice
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem

SIZE_BYTES = 2 * MIB
LEASE_TIMES = LeaseTimes(renew_s=0.1, valid_s=20, drain_s=20, claim_s=0.25, poll_s=0.02)

Opener = Callable[[bool], BlockDevice]


def file_opener(path: Path, engine: str) -> Opener:
    with FileDevice.create(path, SIZE_BYTES, engine=engine):
        pass
    return lambda writable: FileDevice(path, writable=writable, engine=engine)


@contextlib.contextmanager
def loop_opener(path: Path, sector_bytes: int) -> Iterator[Opener]:
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("a loop device needs root and losetup")
    path.write_bytes(bytes(SIZE_BYTES))
    made = subprocess.run(
        ["losetup", "--find", "--show", "--sector-size", str(sector_bytes), path],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"losetup does not work here: {made.stderr.strip()}")
    node = made.stdout.strip()
    try:
        yield lambda writable: FileDevice(node, writable=writable)
    finally:
        subprocess.run(["losetup", "--detach", node], check=True)


def kernel_target_opener(kind: str, target: KernelTarget) -> Opener:
    """Return a function that opens ``nvmet-BLOCKBYTES[-digests]`` of a kernel target."""
    nsid = 2 if "-4096" in kind else 1
    options = {"hdgst": 1, "ddgst": 1} if kind.endswith("-digests") else {}
    target.wipe(OPEN, nsid)
    return lambda writable: open_quickly(target.uri(OPEN, nsid, **options), writable)


@contextlib.contextmanager
def spdk_target_opener(kind: str, target: spdk.SpdkTarget) -> Iterator[Opener]:
    """Return a function that opens SPDK's target by SPDK (``spdk-``) or libdlfs (``nvmf-``)."""
    name, block_bytes, *flags = kind.split("-")
    options = dict.fromkeys(OPTIONS[flags[0]], 1) if flags else {}
    nqn = f"nqn.2024-01.org.dlfs.test:{kind}"
    with target.subsystem(nqn, [spdk.Namespace(SIZE_BYTES, int(block_bytes))]):
        make = target.spdk_uri if name == "spdk" else target.tcp_uri
        yield lambda writable: open_quickly(make(nqn, **options), writable)


def open_quickly(uri: str, writable: bool) -> BlockDevice:
    """Open a namespace with short lease times."""
    device = open_device(uri, writable=writable)
    assert isinstance(device, SharedNamespaceDevice)
    device.lease_times = LEASE_TIMES
    return device


@contextlib.contextmanager
def opener_of(kind: str, directory: Path) -> Iterator[Opener]:
    if kind in ("uring", "threads"):
        yield file_opener(directory / "member.img", kind)
    elif kind == "tmpfs":
        if not Path("/dev/shm").is_dir():
            pytest.skip("there is no tmpfs at /dev/shm")
        path = Path(f"/dev/shm/dlfs-test-{os.getpid()}-{directory.name}.img")
        try:
            yield file_opener(path, "auto")
        finally:
            path.unlink(missing_ok=True)
    elif kind.startswith("nvme-tcp"):
        block_bytes = 4096 if "-4096" in kind else 512
        subsystem = Subsystem(DEFAULT_NQN, [Namespace(SIZE_BYTES, block_bytes=block_bytes)])
        options = "&hdgst=1&ddgst=1" if kind.endswith("-digests") else ""
        with ScriptedTarget([subsystem]) as target:
            uri = target.uri() + options
            yield lambda writable: open_quickly(uri, writable)
    elif kind in ("loop-512", "loop-4096"):
        with loop_opener(directory / "disk.img", int(kind[5:])) as opener:
            yield opener
    else:
        name = f"contract-{directory.name}"
        memory: Opener = lambda writable: MemoryDevice(name, SIZE_BYTES, writable=writable)  # noqa: E731
        wrap: dict[str, Opener] = {
            "memory": memory,
            "fault": lambda writable: FaultyDevice(memory(writable)),
            "recording": lambda writable: RecordingDevice(memory(writable)),
        }
        try:
            yield wrap[kind]
        finally:
            MemoryDevice.forget(name)


OPTIONS = {"digests": ("hdgst", "ddgst"), "bounce": ("bounce",)}
SPDK_TARGET_KINDS = (
    "spdk-512", "spdk-4096", "spdk-4096-bounce",
    "nvmf-512", "nvmf-4096", "nvmf-512-digests", "nvmf-4096-digests",
)  # fmt: skip
KERNEL_TARGET_KINDS = ("nvmet-512", "nvmet-4096-digests")
KINDS = [
    pytest.param("uring", marks=pytest.mark.uring),
    pytest.param("threads"),
    pytest.param("tmpfs"),
    pytest.param("loop-512", marks=pytest.mark.root),
    pytest.param("loop-4096", marks=pytest.mark.root),
    pytest.param("nvme-tcp"),
    pytest.param("nvme-tcp-4096-digests"),
    pytest.param("memory"),
    pytest.param("fault"),
    pytest.param("recording"),
    *(pytest.param(kind, marks=pytest.mark.qemu) for kind in KERNEL_TARGET_KINDS),
    *(pytest.param(kind, marks=pytest.mark.spdk) for kind in SPDK_TARGET_KINDS),
]
FILE_KINDS = ("uring", "threads", "tmpfs", "loop-512", "loop-4096")


@contextlib.contextmanager
def opener_for(request: pytest.FixtureRequest, kind: str, directory: Path) -> Iterator[Opener]:
    """Return a function that opens a device of a kind; a fixture may provide its target."""
    if kind in KERNEL_TARGET_KINDS:
        yield kernel_target_opener(kind, request.getfixturevalue("kernel_target"))
    elif kind in SPDK_TARGET_KINDS:
        with spdk_target_opener(kind, request.getfixturevalue("spdk_target")) as made:
            yield made
    else:
        with opener_of(kind, directory) as made:
            yield made
