"""Fixtures for all tests, and what a machine must have for them.

A test marked ``containers``, ``fuse``, ``jupyterhub``, ``prometheus``, ``qemu``, ``root``,
``slurm``, ``spdk`` or ``uring`` is skipped, with the reason, where the machine lacks it, ``torch``,
``ray`` and ``frameworks`` where those packages are missing.
CI names what it has in ``DLFS_REQUIRE`` (such as ``fuse,root,uring``); there, lacking it fails the
test, so that no skip goes unseen. Hypothesis has no limit on the time of an example: a busy machine
would fail a test for nothing. CI draws the same examples in every run, so that a failure is about
the change; runs elsewhere draw new ones.
"""

from __future__ import annotations

import errno
import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.config import create_terminal_writer
from hypothesis import HealthCheck, settings

from dlfs._native.device import NativeDevice
from dlfs.errors import DeviceError
from tests.containers.podman import lacks_containers
from tests.jupyterhub.hub import lacks_hub
from tests.nvmet.kernel import lacks_guest
from tests.nvmet.shared import SUBSYSTEMS
from tests.nvmet.target import KernelTarget
from tests.slurm.lab import lacks_slurm
from tests.spdk.target import SpdkTarget, lacks_spdk


def _lacks_fuse() -> str | None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "cannot open /dev/fuse"
    if shutil.which("fusermount3") is None:
        return "no fusermount3 (package fuse3)"
    if importlib.util.find_spec("pyfuse3") is None:
        return "no pyfuse3 (the extra pyfuse3)"
    return None


def _lacks_root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


@functools.cache
def _lacks_uring() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "disk"
        path.write_bytes(bytes(1 << 16))
        try:
            with NativeDevice.open_file(str(path), uri="a trial file", engine="uring") as device:
                device.queue(1).close()
        except DeviceError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES):
                return f"no io_uring: {error}"
            raise
    return None


def _lacks_slurm() -> str | None:
    return lacks_slurm() if os.environ.get("DLFS_SLURM") else "takes minutes: make test-slurm"


def _lacks_hub() -> str | None:
    wanted = os.environ.get("DLFS_JUPYTERHUB")
    return lacks_hub() if wanted else "takes minutes: make test-jupyterhub"


def _lacks_prometheus() -> str | None:
    return None if shutil.which("prometheus") else "no prometheus (package prometheus)"


def _lacks_ray() -> str | None:
    if importlib.util.find_spec("ray") is None:
        return "no ray (make test PACKAGES='ray[client]')"
    return None


def _lacks_torch() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "no torch (make test PACKAGES=torch)"
    return None


def _lacks_frameworks() -> str | None:
    packages = ("accelerate", "ipykernel", "lightning", "nbclient", "torch", "torchdata")
    packages += ("transformers",)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"no {', '.join(missing)}" if missing else None


_LACKS: dict[str, Callable[[], str | None]] = {
    "containers": lacks_containers,
    "frameworks": _lacks_frameworks,
    "fuse": _lacks_fuse,
    "jupyterhub": _lacks_hub,
    "prometheus": _lacks_prometheus,
    "qemu": lacks_guest,
    "ray": _lacks_ray,
    "root": _lacks_root,
    "slurm": _lacks_slurm,
    "spdk": lacks_spdk,
    "torch": _lacks_torch,
    "uring": _lacks_uring,
}


def _required() -> set[str]:
    names = {name for name in os.environ.get("DLFS_REQUIRE", "").split(",") if name}
    unknown = names - set(_LACKS)
    if unknown:
        raise pytest.UsageError(f"DLFS_REQUIRE: expected {sorted(_LACKS)}, got {sorted(unknown)}")
    return names


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an unknown name in ``DLFS_REQUIRE`` at once, and let Ctrl-C be tested.

    What a shell runs in the background starts with SIGINT ignored, what nohup runs with SIGHUP
    ignored, and would hand that on to every program the tests start. A process that shares the
    tests with others has no standard output: why it ended one that took too long would go unseen.
    """
    _required()
    settings.register_profile(
        "dlfs",
        deadline=None,
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("dlfs")
    for variable in ("DLFS_VOLUME", "DLFS_MEMORY", "DLFS_DEBUG"):  # the user's own defaults
        os.environ.pop(variable, None)
    if hasattr(config, "workerinput"):
        config.get_terminal_writer = lambda: create_terminal_writer(config, sys.__stderr__)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # exec resets it, and this process lives on


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage among what tests make only: what was collected stays until the end."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where it is required, a test whose machine lacks something."""
    for name, lacks in _LACKS.items():
        if item.get_closest_marker(name) is None:
            continue
        reason = lacks()
        if reason is None:
            continue
        if name in _required():
            pytest.fail(f"DLFS_REQUIRE names {name}, but: {reason}", pytrace=False)
        pytest.skip(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests that several processes share, so that those which take longest start first.

    In one process, those of frameworks come last: it forks faster without what they import.
    """
    if hasattr(config, "workerinput"):
        from tests.scheduling import rank_of

        items.sort(key=lambda item: rank_of(item.nodeid))
    else:
        items.sort(key=lambda item: item.get_closest_marker("frameworks") is not None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give the tests to several processes by groups."""
    from tests.scheduling import GroupScheduling

    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def kernel_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelTarget]:
    """The Linux kernel's NVMe/TCP target, one for all tests, which leave it running."""
    with KernelTarget(tmp_path_factory.mktemp("kernel-target"), SUBSYSTEMS) as target:
        yield target


@pytest.fixture(scope="module")
def spdk_target() -> Iterator[SpdkTarget]:
    """SPDK's NVMe-oF target without subsystems; it keeps a CPU busy for as long as it runs."""
    with SpdkTarget() as target:
        yield target
