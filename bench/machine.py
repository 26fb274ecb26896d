"""The machine under test: its facts, its caches, and the C programs that measure its limits.

Every report records the commit, kernel, CPU, device, file system and versions of its run.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import dlfs
from bench.errors import Unavailable
from bench.process import ROOT, output_of

NATIVE = Path(__file__).parent / "native"
BUILD = ROOT / "build" / "bench"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
LIBDLFS = Path(dlfs.__file__).parent / "_native"
LINKED = {
    "bare_uring": ["-luring"],
    "slow_open": ["-shared", "-fPIC", "-ldl"],
    "bare_nvme": [f"-I{ROOT}/native/include", f"-L{LIBDLFS}", f"-Wl,-rpath,{LIBDLFS}", "-ldlfs"],
}
"""Compiler options of the programs in ``native``, by program."""


@dataclass
class Machine:
    """The parts of the machine that contenders share.

    Attributes:
        directory: folder on the disk under test.
        may_drop_caches: drop the kernel's caches before each cold run.
        pretend_cold: run cold contenders with warm caches where caches cannot be dropped; in tests.
        core: processor that NVMe-oF initiators are bound to, one after the other.
        perf: name or path of SPDK's ``spdk_nvme_perf``.
    """

    directory: Path
    may_drop_caches: bool = True
    pretend_cold: bool = False
    core: int = 0
    perf: str = "spdk_nvme_perf"

    def drop_caches(self) -> bool:
        """Write dirty pages back and drop the kernel's caches; return False if not allowed."""
        if not self.may_drop_caches or not os.access(DROP_CACHES, os.W_OK):
            return False
        os.sync()
        with contextlib.suppress(OSError):
            DROP_CACHES.write_text("3\n")
            return True
        return False

    def require_cold(self, *, cold: bool = True) -> None:
        """Drop the kernel's caches for a cold run, which takes root; do nothing for a warm one."""
        if cold and not self.drop_caches() and not self.pretend_cold:
            raise Unavailable("cold files: dropping the kernel's caches needs root")

    def program(self, name: str) -> Path:
        """Compile a C program of ``native`` unless it is newer than its source; return its path."""
        return _compile(name)


@cache
def _compile(name: str) -> Path:
    source, target = NATIVE / f"{name}.c", BUILD / name
    newest = max(source.stat().st_mtime, (NATIVE / "bare.h").stat().st_mtime)
    if target.exists() and target.stat().st_mtime > newest:
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{name}.{os.getpid()}")
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, "-std=c17", "-O2", "-D_GNU_SOURCE", str(source), "-o", str(fresh)]
    command += LINKED.get(name, ["-lpthread"])
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Unavailable(f"{compiler} is not installed: apt-get install gcc libc6-dev") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise Unavailable(f"{name} does not compile (apt-get install liburing-dev): {reason}")
    fresh.replace(target)
    return target


# ---- facts ---------------------------------------------------------------------------------------


def describe(directory: Path) -> dict[str, Any]:
    """Return the facts that results depend on, as plain values."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "root": os.geteuid() == 0,
        **_disk(directory),
        "versions": _versions(),
    }


def _output(*command: object) -> str:
    """Return a program's output; "" if it fails or is not installed."""
    with contextlib.suppress(Unavailable, FileNotFoundError):
        return output_of(*command, cwd=ROOT).strip()
    return ""


def _commit() -> str:
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{commit} and changes" if commit and changed else commit or "unknown"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _disk(directory: Path) -> dict[str, Any]:
    """Describe the file system of a directory and the disk below it."""
    found = _output("findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "--target", directory)
    device, kind = [*found.split(), "", ""][:2]
    number = directory.stat().st_dev
    queue = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    queue = queue if (queue / "queue").exists() else queue.resolve().parent
    return {
        "directory": str(directory),
        "file_system": kind,
        "device": device,
        "device_model": _read(queue / "device" / "model"),
        "device_scheduler": _read(queue / "queue" / "scheduler"),
        "device_bytes": 512 * int(_read(queue / "size") or 0),
    }


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dlfs": dlfs.__version__}
    for package in ("numpy", "trio"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["fio"] = _output("fio", "--version")
    found["compiler"] = (_output("gcc", "--version").splitlines() or [""])[0]
    return found
