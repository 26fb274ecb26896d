"""Installs the packages of a release in clean environments, and runs the README with them.

    python -m deploy.release.check [PACKAGE ...]

The wheel of this machine and the source distribution are each installed for every ``python3.X`` on
PATH that dlfs supports. The wheel is installed without a compiler. Each environment then runs the
sections of the README in a temporary folder, and a native mount. The PACKAGEs are installed in
addition: with torch, the section on PyTorch runs, too.

The wheel of another architecture runs in qemu-user with a Python of Debian. qemu-user has no
io_uring, and programs that run in it cannot start others of their architecture. So these wheels
read by threads, and a mount stays in the foreground. The check prints what it leaves out, with the
reason.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.release import ARCHITECTURES, GLIBC, PACKAGES, ROOT, WORK
from deploy.release.debian import unpack
from tests.support.examples import Installation, run_example, sections

MINOR_VERSIONS = range(11, 30)
"""Minor versions of Python 3 to look for on PATH, from the oldest that dlfs supports."""
README = "README.md: "
NEEDED_MODULES = {"In PyTorch": "torch", "Through a mount": "pyfuse3"}
"""The module that a section of the README needs in addition to the extra ``mount``."""
NATIVE_MOUNT = """\
$ dlfs mount photos.img mnt --fuse=native 2>/dev/null
$ cmp photos/dog/0001.jpg mnt/photos/dog/0001.jpg
$ dlfs umount mnt 2>/dev/null
"""
"""A mount by the library that is in the wheel, before pyfuse3 is installed."""
TLS_HANDSHAKE = """\
import os, socket, threading
import dlfs
from dlfs.fabric.keys import KeyKind, generate_key, write_key

os.environ["DLFS_KEYS"] = os.path.abspath("keys")
write_key("wire", generate_key(KeyKind.TLS))
hellos = []


def serve():
    while True:  # libdlfs offers a second identity, and tries again
        connection, _ = listener.accept()
        with connection:
            hellos.append(connection.recv(4096)[0])


with socket.create_server(("127.0.0.1", 0)) as listener:
    threading.Thread(target=serve, daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        dlfs.open(f"nvme-tcp://{address}/nqn.2024-01.org.example:disk0?nsid=1&tls_psk=wire")
    except dlfs.AuthenticationError as error:
        print("in the TLS handshake" in str(error))  # True
print(set(hellos))  # {22}
"""
"""The beginning of a TLS handshake, by the OpenSSL that is in the wheel."""
FOREGROUND_MOUNT = """\
$ dlfs mount photos.img mnt --fuse=native --foreground >mount.log 2>&1 & echo $! >mount.pid
$ timeout 300 sh -c 'until mountpoint -q mnt; do sleep 0.1; done'
$ cmp photos/dog/0001.jpg mnt/photos/dog/0001.jpg
$ fusermount3 -u mnt && tail --pid=$(cat mount.pid) -f /dev/null
"""
"""The same by a server that starts no other process."""
EMULATED_PACKAGES = ["python3-minimal", "libpython3-stdlib", "libstdc++6"]
"""Debian packages with which the wheel of another architecture runs: numpy needs libstdc++6."""
EMULATED_SECTIONS = ["In Python", "Samples to try it with", "One service for a machine"]
"""Sections of the README that start no program of the emulated architecture."""


def main(packages: Sequence[str]) -> int:
    """Check all packages in PACKAGES; the arguments are further packages to install."""
    machine = platform.machine()
    (sdist,) = PACKAGES.glob("*.tar.gz")
    wheels = {name: next(PACKAGES.glob(f"*_{name}.whl")) for name in ARCHITECTURES}
    for python in _pythons():
        for package in (wheels[machine], sdist):
            _check_installed(python, package, packages)
    for architecture in ARCHITECTURES.keys() - {machine}:
        _check_emulated(wheels[architecture], architecture)
    return 0


def _pythons() -> Iterator[str]:
    """Give the names of the Pythons on PATH that dlfs supports."""
    for minor in MINOR_VERSIONS:
        name = f"python3.{minor}"
        if shutil.which(name) is None:
            continue
        # A command of this name may be a stub for a Python that is not installed.
        trial = subprocess.run([name, "-c", "import ensurepip, venv"], capture_output=True)
        if trial.returncode == 0:
            yield name
        else:
            _not_run(name, "it does not start, or lacks the module venv")


def _check_installed(python: str, package: Path, packages: Sequence[str]) -> None:
    """Install a package in a clean environment and run the README there.

    Raises:
        CalledProcessError: the installation failed.
        ExampleError: an example failed, or printed other text than the README shows.
    """
    title = f"{python}, {package.name}"
    with _folder() as folder:
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        installation = Installation(
            python=folder / "venv" / "bin" / "python",
            variables={"PYTHONPATH": "", "PYTHONSAFEPATH": "1"},
        )
        without_compiler = {"CC": "false", "CXX": "false"} if package.suffix == ".whl" else {}
        _pip(installation.python, [f"{package}[mount]"], without_compiler)
        _check_import_path(installation)
        samples = folder / "examples"
        samples.mkdir()
        _run_sections(title, installation, samples, _readme().keys() - NEEDED_MODULES.keys())
        _run_handshake(title, installation, samples)
        if not _run_mount(title, NATIVE_MOUNT, installation, samples):
            return
        _pip(installation.python, [f"{package}[pyfuse3]", *packages], {})
        _run_sections(title, installation, samples, NEEDED_MODULES.keys())


def _check_emulated(wheel: Path, architecture: str) -> None:
    """Run a wheel of another architecture in qemu-user, with the Python of Debian.

    Raises:
        CalledProcessError: the installation failed.
        ExampleError: an example failed, or printed other text than the README shows.
    """
    emulator = shutil.which(f"qemu-{architecture}-static")
    if emulator is None:
        _not_run(wheel.name, f"no qemu-{architecture}-static (Debian's qemu-user-static)")
        return
    root = WORK / "emulated" / architecture
    unpack(EMULATED_PACKAGES, root, architecture=ARCHITECTURES[architecture], dependencies=True)
    (python,) = (root / "usr" / "bin").glob("python3.[0-9]*")
    with _folder() as folder:
        modules = folder / "modules"
        _install_emulated(wheel, architecture, python.name.removeprefix("python"), modules)
        commands = {
            "python": [emulator, "-L", str(root), str(python)],
            "dlfs": [str(folder / "bin" / "python"), str(modules / "bin" / "dlfs")],
        }
        (folder / "bin").mkdir()
        for name, command in commands.items():
            script = folder / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            script.chmod(0o755)
        installation = Installation(
            python=folder / "bin" / "python",
            variables={"PYTHONPATH": str(modules), "PYTHONSAFEPATH": "1"},
        )
        samples = folder / "examples"
        samples.mkdir()
        title = f"{python.name} in qemu-{architecture}, {wheel.name}"
        _run_sections(title, installation, samples, EMULATED_SECTIONS)
        _run_handshake(title, installation, samples)
        _run_mount(title, FOREGROUND_MOUNT, installation, samples)
        _not_run(f"{title}: io_uring", "qemu-user does not emulate it")


def _install_emulated(wheel: Path, architecture: str, version: str, modules: Path) -> None:
    """Install a wheel and its dependencies for another architecture into a folder."""
    options = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    options += ["--abi", f"cp{version.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    for minor in range(17, GLIBC[1] + 1):
        options += ["--platform", f"manylinux_{GLIBC[0]}_{minor}_{architecture}"]
    options += ["--platform", f"manylinux2014_{architecture}"]
    _pip(Path(sys.executable), ["--target", str(modules), *options, f"{wheel}[mount]"], {})


def _readme() -> dict[str, list[tuple[str, str]]]:
    """Return the blocks of each section of the README, in its order."""
    found = sections("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))
    return {title.removeprefix(README): blocks for title, blocks in found}


def _run_sections(
    title: str, installation: Installation, folder: Path, chosen: Collection[str]
) -> None:
    """Run sections of the README in a folder, in the order of the README."""
    passed = []
    for section, blocks in _readme().items():
        if section not in chosen:
            continue
        module = NEEDED_MODULES.get(section)
        if module is not None and not _has_module(installation, module):
            _not_run(f"{title}: {section}", f"{module} is not installed")
            continue
        for language, block in blocks:
            run_example(language, block, folder, installation)
        passed.append(section)
    print(f"{title}: {', '.join(passed)}: passed", flush=True)


def _run_handshake(title: str, installation: Installation, folder: Path) -> None:
    """Begin a TLS handshake, for which libdlfs_security and its OpenSSL must load."""
    run_example("python", TLS_HANDSHAKE, folder, installation)
    print(f"{title}: TLS: passed", flush=True)


def _run_mount(title: str, block: str, installation: Installation, folder: Path) -> bool:
    """Run the commands of a native mount; return False if this machine allows no mounts."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        _not_run(f"{title}: mounts", "/dev/fuse cannot be opened")
        return False
    run_example("console", block, folder, installation)
    print(f"{title}: native mount: passed", flush=True)
    return True


def _has_module(installation: Installation, module: str) -> bool:
    """Return True if the installation can import a module."""
    found = subprocess.run(
        [installation.python, "-c", f"import {module}"],
        env=installation.environment(),
        capture_output=True,
        check=False,
    )
    return found.returncode == 0


def _check_import_path(installation: Installation) -> None:
    """Check that an environment imports the dlfs that was installed in it, not the checkout."""
    environment = installation.python.parents[1]
    code = f"import dlfs, sys\nprint(dlfs.__file__.startswith({str(environment)!r}))  # True\n"
    run_example("python", code, environment, installation)


def _pip(python: Path, words: Sequence[str], variables: dict[str, str]) -> None:
    """Run ``pip install`` with additional environment variables."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *words], env={**os.environ, **variables}, check=True)


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a temporary folder; at the end unmount its mount point, if need be, and remove it."""
    with tempfile.TemporaryDirectory(prefix="dlfs-release-") as name:
        folder = Path(name)
        mount_point = folder / "examples" / "mnt"
        try:
            yield folder
        finally:
            if os.path.ismount(mount_point):  # an example failed
                subprocess.run(["fusermount3", "-uz", mount_point], check=False)


def _not_run(subject: str, reason: str) -> None:
    """Print that a part of the check is left out."""
    print(f"{subject}: not run: {reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
