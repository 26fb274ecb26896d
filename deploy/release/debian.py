"""Downloads and unpacks Debian packages of any architecture, without installing them.

apt-get works on state and a cache of its own, so that it needs no root, and the system's list of
packages and architectures stays as it is. The package sources are those of the machine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def unpack(packages: list[str], folder: Path, *, architecture: str, dependencies: bool) -> None:
    """Replace a folder by the contents of Debian packages.

    Args:
        packages: names of the packages.
        folder: the folder; what it contained is removed.
        architecture: Debian's name of the architecture, such as ``arm64``.
        dependencies: also unpack all packages that these depend on.

    Raises:
        CalledProcessError: apt-get or dpkg-deb failed and has printed the reason.
    """
    shutil.rmtree(folder, ignore_errors=True)
    state, cache = folder / "apt" / "state", folder / "apt" / "cache"
    archives = cache / "archives"
    (state / "lists" / "partial").mkdir(parents=True)
    (archives / "partial").mkdir(parents=True)
    (state / "status").touch()
    apt = [
        *("apt-get", "-qq"),
        *("-o", f"Dir::State={state}", "-o", f"Dir::State::status={state / 'status'}"),
        *("-o", f"Dir::Cache={cache}", "-o", "APT::Sandbox::User=root"),
        *("-o", f"APT::Architecture={architecture}", "-o", f"APT::Architectures={architecture}"),
    ]
    download = ["download"]
    if dependencies:
        download = ["install", "--download-only", "--yes", "--no-install-recommends"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run(
        [*apt, *download, *packages], cwd=archives, stdout=subprocess.DEVNULL, check=True
    )
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    shutil.rmtree(folder / "apt")
