"""Ranks of one machine, forked by a process that has imported PyTorch: that takes seconds."""

from __future__ import annotations

import os
import sys


def fork_ranks(world: int) -> int:
    """Go on as several ranks; the process that calls it ends with the last of them.

    Args:
        world: number of ranks.

    Returns:
        The rank of this process, which is in its environment too, as launchers put it there.
    """
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            # Accelerate wants them, and does not use them.
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
            return rank
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))
