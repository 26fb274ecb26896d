"""The shell command that installs the optional packages of an extra.

The command names the packages themselves, with the versions in the metadata of this installation.
It is therefore right for a wheel, a checkout and an installation from an index, and it neither
fetches nor changes DLFS.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

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
