"""Makes the packages of a release, and checks them: ``make release``, ``make release-check``.

``build`` makes the source distribution and one wheel per architecture. ``check`` installs them in
clean environments and runs the README there. CONTRIBUTING.md describes how a release is made.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "release"
"""Folder of intermediate files."""
PACKAGES = ROOT / "dist" / "release"
"""Folder of the finished packages."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's name of each architecture that has a wheel, by the name in wheel tags."""
GLIBC = (2, 28)
"""Oldest version of glibc on which the wheels load."""
