"""Debian's kernel for the tests' virtual machines: fetched once, unpacked, never installed.

``python -m tests.nvmet.kernel`` (a rule of the Makefile) downloads the package of a cloud kernel
with apt and stores the files of a guest in ``build/nvmet``. They are the kernel as an ELF file,
which the emulated processor need not decompress, and the modules in ``MODULES`` with their
dependencies, in the order to load them. The cloud kernel has virtio's PCI transport and the NVMe
core built in. Downloading needs apt's package lists; where they are missing, root fetches them.
"""

from __future__ import annotations

import io
import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import zstandard

FOLDER = Path(__file__).parents[2] / "build" / "nvmet"
META_PACKAGES = ("linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64")
"""Kernel packages of Debian 12 with its security updates, then of later releases."""
MODULES = (
    "virtio_net", "virtio_blk", "brd", "loop", "configfs", "nvmet", "nvmet_tcp", "nvme_tcp",
)  # fmt: skip
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "setpriv": "util-linux",
}
"""Programs that start a guest or run in it, with their Debian packages."""
KERNEL_BYTES_MAX = 256 << 20
DOWNLOAD_SECONDS_MAX = 600

_HEADER_SECTORS = 0x1F1
_HEADER_PAYLOAD = 0x248
_ZSTD = b"\x28\xb5\x2f\xfd"
_XZ = b"\xfd7zXZ\0"


class KernelError(Exception):
    """The kernel could not be fetched."""


@dataclass(frozen=True)
class GuestKernel:
    """The guest kernel in ``build/nvmet``."""

    vmlinux: Path
    modules: tuple[Path, ...]
    """The modules, in the order to load them."""


def find_kernel() -> GuestKernel | None:
    """Return the kernel that was fetched before, or None."""
    order = FOLDER / "order"
    if not order.exists():
        return None
    modules = tuple(FOLDER / f"{name}.ko" for name in order.read_text().split())
    return GuestKernel(FOLDER / "vmlinux", modules)


def lacks_guest() -> str | None:
    """Return what this machine lacks to run a guest, or None."""
    if platform.machine() != "x86_64":
        return f"the guest is x86_64, this machine {platform.machine()}"
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"no {program} (package {package})"
    if b"/ld-linux" in Path(str(shutil.which("busybox"))).read_bytes()[:4096]:
        return "busybox is not static (package busybox-static)"
    if find_kernel() is None:
        return f"no guest kernel in {FOLDER} (make build/nvmet/order; {META_PACKAGES[0]})"
    return None


# ---- fetching ------------------------------------------------------------------------------------


def _run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_SECONDS_MAX,
    )
    if done.returncode != 0:
        raise KernelError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _package_name() -> str:
    """Return the newest kernel package that a meta package depends on."""
    for meta in META_PACKAGES:
        try:
            output = _run("apt-cache", "depends", meta)
        except KernelError:
            continue
        found = re.search(r"Depends: (linux-image-\d\S*-cloud-amd64)$", output, re.MULTILINE)
        if found:
            return found[1]
    raise KernelError(f"apt knows none of {', '.join(META_PACKAGES)}")


def _download_known(folder: Path) -> Path:
    # apt downloads as the user _apt, which has no access to the folder.
    sandbox = "APT::Sandbox::User=root"
    _run("apt-get", "-qq", "-o", sandbox, "download", _package_name(), folder=folder)
    return next(folder.glob("linux-image-*.deb"))


def _download(folder: Path) -> Path:
    """Download the package; updates the package lists if they do not lead to it."""
    try:
        return _download_known(folder)
    except KernelError:
        if os.geteuid() != 0:
            raise
    _run("apt-get", "-qq", "update")
    return _download_known(folder)


def decompress_kernel(image: bytes) -> bytes:
    """Return the ELF file inside a bzImage.

    Source: Linux, Documentation/arch/x86/boot.rst, fields setup_sects and payload_offset.
    """
    offset, length = struct.unpack_from("<II", image, _HEADER_PAYLOAD)
    start = (image[_HEADER_SECTORS] + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(_ZSTD):
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    elif payload.startswith(_XZ):
        plain = lzma.LZMADecompressor().decompress(payload, KERNEL_BYTES_MAX)
    else:
        raise KernelError(f"the kernel is compressed in an unknown way: {payload[:6].hex()}")
    if not plain.startswith(b"\x7fELF"):
        raise KernelError(f"the kernel's payload is no ELF file: {plain[:4].hex()}")
    return plain


def order_modules(
    wanted: Collection[str], read: Callable[[str], bytes], built_in: Collection[str]
) -> dict[str, bytes]:
    """Return modules and their dependencies in the order to load them.

    Args:
        wanted: names, with underscores.
        read: the ELF file of a module.
        built_in: what the kernel has without loading it.
    """
    ordered: dict[str, bytes] = {}

    def visit(name: str) -> None:
        if name in ordered or name in built_in:
            return
        module = read(name)
        found = re.search(rb"\0depends=([^\0]+)\0", module)
        for other in found[1].decode().split(",") if found else ():
            visit(_name_of(other))
        ordered[name] = module

    for name in wanted:
        visit(name)
    return ordered


def _name_of(path: str) -> str:
    """Return the name of a module from that of its file."""
    return PurePosixPath(path).name.partition(".ko")[0].replace("-", "_")


def unpack(package: Path, folder: Path) -> None:
    """Write ``vmlinux``, the modules, and ``order``, which lists them, into a folder."""
    unpacked = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as archive:
        members = {_name_of(member.name): member for member in archive if member.isfile()}

        def content(name: str) -> bytes:
            if name not in members or (file := archive.extractfile(members[name])) is None:
                raise KernelError(f"{package.name} has no {name}")
            data = file.read()
            return lzma.decompress(data) if data.startswith(_XZ) else data

        image = next(name for name in members if name.startswith("vmlinuz_"))
        (folder / "vmlinux").write_bytes(decompress_kernel(content(image)))
        built_in = {_name_of(path) for path in content("modules.builtin").decode().split()}
        modules = order_modules(MODULES, content, built_in)
    for name, module in modules.items():
        (folder / f"{name}.ko").write_bytes(module)
    (folder / "order").write_text("\n".join(modules) + "\n")


def fetch_kernel() -> str:
    """Download and unpack the kernel again; returns the name of the package."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        package = _download(Path(scratch))
        made = Path(scratch) / "made"
        made.mkdir()
        unpack(package, made)
        # Written last: other code takes `order` as the sign that the folder is complete.
        for path in sorted(made.iterdir(), key=lambda path: path.name == "order"):
            path.replace(FOLDER / path.name)
        return package.name


def main() -> None:
    """Fetch the kernel, or print why that is not possible."""
    try:
        print(f"Unpacked {fetch_kernel()} into {FOLDER}")
    except (KernelError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"No kernel for the tests marked qemu: {error}")


if __name__ == "__main__":
    main()
