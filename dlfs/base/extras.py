"""Imports the optional packages of an extra, and gives the shell command that installs them.

The command names the packages themselves, with the versions in the metadata of this installation.
It is therefore right for a wheel, a checkout and an installation from an index, and it neither
fetches nor changes DLFS.
"""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

from dlfs.errors import UsageError

DISTRIBUTION = "dlfs-storage"
"""Name of the distribution; in the public index, ``dlfs`` is another project."""

_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")
_OWN = re.compile(rf"{DISTRIBUTION}\[(?P<extras>[^]]+)\]")


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of an extra.

    Args:
        extra: a name of ``[project.optional-dependencies]`` in pyproject.toml, such as ``torch``.
    """
    from importlib import metadata  # 30 ms, which every start of the command line would take

    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"pip install {shlex.quote(f'{Path(__file__).parents[2]}[{extra}]')}"
    pip = "uv pip" if (distribution.read_text("INSTALLER") or "").strip() == "uv" else "pip"
    packages = _packages(distribution.requires or [], extra)
    return f"{pip} install {shlex.join(dict.fromkeys(packages))}"


def load_package(name: str, *, extra: str, what: str, package: str | None = None) -> Any:
    """Import an optional package, or a module of it.

    Args:
        name: name of the module.
        extra: extra of dlfs that installs the package.
        what: action that needs it, for the error, such as ``import x.parquet``.
        package: name of the package; by default that of the top module.

    Raises:
        UsageError: the package is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{what}: expected {package or name.partition('.')[0]} to be installed ({error}): "
            f"{install_command(extra)}"
        ) from error


def _packages(requirements: list[str], extra: str) -> list[str]:
    """Return an extra's requirements; an extra that it refers to is replaced by its own."""
    packages: list[str] = []
    for requirement in requirements:
        found = _REQUIREMENT.fullmatch(requirement)
        if found is None or found["extra"] != extra:
            continue
        own = _OWN.fullmatch(found["package"])
        if own is None:
            packages.append(found["package"])
        else:
            for other in own["extras"].split(","):
                packages += _packages(requirements, other)
    return packages
