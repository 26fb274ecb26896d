"""The subsystems of the target that most tests share, as the fixture ``kernel_target``."""

from __future__ import annotations

from dlfs.units import MIB
from tests.nvmet.target import Namespace, Subsystem

OPEN = "nqn.2024-01.org.dlfs.test:open"
"""Subsystem that allows any host. Its namespaces 1 and 2 have blocks of 512 and 4096 bytes; 2 MiB
each."""
RESTRICTED = "nqn.2024-01.org.dlfs.test:restricted"
"""Subsystem that allows ``ALLOWED_HOST`` only."""
ALLOWED_HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-4111-8111-111111111111"
REFUSED_HOST = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4222-8222-222222222222"

SUBSYSTEMS = (
    Subsystem(OPEN, [Namespace(2 * MIB, 512), Namespace(2 * MIB, 4096)]),
    Subsystem(RESTRICTED, [Namespace(2 * MIB)], hosts=[ALLOWED_HOST]),
)
