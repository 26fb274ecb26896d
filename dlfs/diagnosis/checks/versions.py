"""Versions: of DLFS, its libraries and Python, of fusermount3, and of optional packages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import dlfs
from dlfs.base.extras import DISTRIBUTION, install_command
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import Machine
from dlfs.errors import DlfsError

PROGRAM_SECONDS = 5.0
"""Longest wait for a program that prints its version, in seconds."""
OPTIONAL = (
    ("trio", "mount", Severity.NOTE, "mounts and node services do not start"),
    ("torch", "torch", Severity.OK, ""),
)
"""Packages that a part of DLFS needs, the extra that brings each, and what happens without."""


def check_versions(machine: Machine) -> Iterator[Finding]:
    """Check that DLFS and its libraries agree, and name the versions of what they use."""
    if not machine.live:
        return
    version = ".".join(map(str, sys.version_info[:3]))
    yield ok("versions", f"Python {version}", sys.executable)
    yield from _check_package()
    yield from _check_libraries()
    yield from _check_helper()
    yield from _check_optional()


def _check_package() -> Iterator[Finding]:
    from importlib import metadata

    source = dlfs.__file__ or "dlfs"
    try:
        installed = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield ok("versions", f"dlfs {dlfs.__version__}, which is not installed", source)
        return
    if installed == dlfs.__version__:
        yield ok("versions", f"dlfs {installed}", source)
        return
    yield problem(
        "versions",
        Severity.WARNING,
        got=f"dlfs {dlfs.__version__}, and {DISTRIBUTION} {installed} is installed",
        source=source,
        expected="one version",
        why="Python takes another dlfs than pip has installed",
        fix="run Python elsewhere than in a checkout, or unset PYTHONPATH",
    )


def _check_libraries() -> Iterator[Finding]:
    from dlfs._native.versions import LIBRARIES, read_version

    for name, needed_for in LIBRARIES.items():
        try:
            yield ok("versions", *read_version(name))
        except DlfsError as error:
            yield problem(
                "versions",
                Severity.NOTE if needed_for else Severity.ERROR,
                got=str(error).partition("; ")[0],
                source=name,
                expected="a library of this version of DLFS",
                why=needed_for or "nothing of DLFS works",
                fix="install the wheel again, or make build in a checkout",
            )


def _check_helper() -> Iterator[Finding]:
    program = shutil.which("fusermount3")
    if program is None:
        return  # whether it is needed, another check says
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, timeout=PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    found = re.search(r"\d+\.\S+", done.stdout.decode("utf-8", "replace"))
    yield ok("versions", f"fusermount3 {found[0] if found else 'of an unknown version'}", program)


def _check_optional() -> Iterator[Finding]:
    from importlib import metadata

    for name, extra, severity, why in OPTIONAL:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if severity is Severity.OK:
                yield ok("versions", f"{name} is not installed, which is optional", "pip")
                continue
            yield problem(
                "versions",
                severity,
                got=f"{name} is not installed",
                source="pip",
                expected=f"{name}, for some parts of DLFS",
                why=why,
                fix=install_command(extra),
            )
        else:
            yield ok("versions", f"{name} {version}", "pip")
