"""The control groups (v1 or v2) that limit this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc/self")


def find_groups(controller: str, proc: Path, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the directories of a process's control groups, and of those above them.

    Args:
        controller: name of the controller in v1, such as ``memory``.
        proc: directory of the process in /proc.
        root: directory below which the control groups are mounted.
    """
    paths: dict[str, str] = {}
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controller in controllers.split(","):
                paths["cgroup2" if number == "0" else "cgroup"] = path
    with suppress(OSError):
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            group_root, point = before.split(" ")[3:5]
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
                mounted = root / point.lstrip("/")
                yield from _upwards(mounted, group_root, paths.get(kind, group_root))


def _upwards(mounted: Path, root: str, path: str) -> Iterator[Path]:
    """Yield a group's directory and those above it, in a mount of the groups below a root."""
    inside = os.path.relpath(path, root)
    group = mounted if inside.startswith("..") else mounted / inside
    yield group
    for above in group.parents:
        if not above.is_relative_to(mounted):
            break
        yield above
