"""``python -m bench.cluster.storage ADDRESS PORT BYTES``: a storage node, until it is killed.

The tests' NVMe/TCP target, in Python, with one namespace in memory: it shows that the job's reads
are right, and nothing of how fast a target is.
"""

from __future__ import annotations

import sys
import time

from tests.support.nvme.namespace import Namespace
from tests.support.nvme.scripted import ScriptedTarget
from tests.support.nvme.subsystem import Subsystem

NQN = "nqn.2026-11.org.dlfs:cluster"


def uri_of(address: str, port: int) -> str:
    """Return the URI of a storage node's namespace."""
    return f"nvme-tcp://{address}:{port}/{NQN}?nsid=1"


def main(address: str, port: str, size_bytes: str) -> None:
    """Serve until the process is killed."""
    namespace = Namespace(int(size_bytes), block_bytes=4096)
    target = ScriptedTarget([Subsystem(NQN, [namespace])], port=int(port))
    target.addresses = [address]
    with target:
        print("ready", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
