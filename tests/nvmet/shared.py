"""The subsystems of the target that most tests share, as the fixture ``kernel_target``."""

from __future__ import annotations

from dlfs.base.units import MIB
from dlfs.fabric.keys import generate_key
from tests.nvmet.target import Keys, Namespace, Subsystem

OPEN = "nqn.2024-01.org.dlfs.test:open"
"""Subsystem that allows any host. Its namespaces 1 and 2 have blocks of 512 and 4096 bytes; 2 MiB
each."""
RESTRICTED = "nqn.2024-01.org.dlfs.test:restricted"
"""Subsystem that allows ``ALLOWED_HOST`` only."""
ALLOWED_HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-4111-8111-111111111111"
REFUSED_HOST = "nqn.2014-08.org.nvmexpress:uuid:22222222-2222-4222-8222-222222222222"

AUTHENTICATED = "nqn.2024-01.org.dlfs.test:authenticated"
"""Subsystem whose hosts are those of ``KEYS``, each with other keys, another hash or group."""
KEYS = {
    f"nqn.2024-01.org.dlfs.test:host-{digest}-{group}": Keys(
        generate_key(hash_id=hash_id), generate_key(hash_id=hash_id), digest, group
    )
    for hash_id, digest, group in (
        (1, "sha256", "null"), (2, "sha384", "null"), (3, "sha512", "ffdhe2048"),
        (1, "sha256", "ffdhe3072"), (2, "sha384", "ffdhe4096"),
    )
}  # fmt: skip

SUBSYSTEMS = (
    Subsystem(OPEN, [Namespace(2 * MIB, 512), Namespace(2 * MIB, 4096)]),
    Subsystem(RESTRICTED, [Namespace(2 * MIB)], hosts=[ALLOWED_HOST]),
    Subsystem(AUTHENTICATED, [Namespace(2 * MIB)], hosts=tuple(KEYS), keys=KEYS),
)
