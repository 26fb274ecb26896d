"""Lets Ctrl-C raise ``KeyboardInterrupt`` in a verb, so that the verb can undo its work.

Before and after a verb Ctrl-C ends the process: see ``dlfs.cli``.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from dlfs.cli import end


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt the block; change nothing if ``main`` did not run."""
    if signal.getsignal(signal.SIGINT) is not end:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, end)
