"""Two kernel targets, which the tests of volumes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nvmet.target import KernelTarget, Namespace, Subsystem, started
from tests.nvmet.volumes import COPIES, MEMBER_BYTES, MEMBERS

TwoTargets = tuple[KernelTarget, KernelTarget]


@pytest.fixture(scope="session")
def two_targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTargets]:
    """Start two targets with the same namespaces, so that each is a second path to the other's."""
    disks = tmp_path_factory.mktemp("disks")
    subsystems = [
        Subsystem(nqn, [Namespace(MEMBER_BYTES, block_bytes, disks / nqn.rpartition(":")[2])])
        for nqns in (MEMBERS, COPIES)
        for nqn, block_bytes in zip(nqns, (512, 4096), strict=True)
    ]
    one, other = (KernelTarget(tmp_path_factory.mktemp("target"), subsystems) for _ in range(2))
    with started(one, other):
        yield one, other
