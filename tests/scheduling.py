"""Which tests run one after another when several processes share them (``pytest -n``, make test).

A file's tests run in one process, in their order, so that fixtures of a module are made once. Files
that would be in each other's way, or share what takes long to start, are a group, which one process
runs as well. What takes longest comes first, so that no process is left alone with it at the end.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    # Kernel targets in QEMU are started once for all; they load the machine, and wait for it.
    "tests/nvmet/": "guests",
    "tests/contract/": "guests",
    "tests/deploy/": "guests",
    # They share mounts, drop the kernel's caches, and change the mode of /dev/fuse.
    "tests/fuse/": "mounts",
    # They import the same frameworks, which takes longer than the tests.
    "tests/unit/adapters/torch/test_frameworks.py": "frameworks",
    "tests/unit/adapters/torch/test_recipes.py": "frameworks",
    # They compile in the same folders.
    "tests/fuzz/": "fuzzers",
    "tests/native/": "builds",
    "tests/fault/test_nvme_sanitized.py": "builds",
}
"""Group by the beginning of a file's path."""

SLOW_FIRST = (
    "builds",
    "guests",
    "mounts",
    "frameworks",
    "tests/fault/",
    "tests/unit/cli/test_process.py",
    "tests/golden/",
    "tests/service/",
    "tests/unit/adapters/",
    "tests/bench/",
)
"""Groups, or beginnings of paths, in the order to start them; the others follow."""


def group_of(node: str) -> str:
    """The group that a test belongs to: its file, if no other.

    Args:
        node: the test's name, ``tests/file.py::test``.
    """
    file = node.partition("::")[0]
    return next((name for start, name in GROUPS.items() if file.startswith(start)), file)


def rank_of(node: str) -> int:
    """Return the place of a test's group in the order in which groups start; 0 is first."""
    group = group_of(node)
    ranks = (rank for rank, start in enumerate(SLOW_FIRST) if group.startswith(start))
    return next(ranks, len(SLOW_FIRST))


class GroupScheduling(LoadScopeScheduling):
    """Gives whole groups to processes, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
