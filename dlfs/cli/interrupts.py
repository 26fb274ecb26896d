"""Lets Ctrl-C interrupt a verb, by ``KeyboardInterrupt``, so that the verb undoes what it began.

Before a verb and behind it Ctrl-C ends the process: see ``dlfs.cli``.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from dlfs.cli import end


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt the block; where ``main`` did not run, change nothing."""
    if signal.getsignal(signal.SIGINT) is not end:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, end)
