"""What Ctrl-C does: it ends the process at once, or interrupts the verb that runs.

``KeyboardInterrupt`` interrupts a verb, so that it undoes what it began. Before it and behind it
there is nothing to undo: while Python imports modules and while it shuts down, the handler prints
the line and exits. A process that was started with SIGINT ignored goes on ignoring it.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CODE = 130
"""Exit code of an interrupted command (``dlfs.cli.exits``, which takes longer to load)."""


def end(_number: int = signal.SIGINT, _frame: FrameType | None = None) -> NoReturn:
    """End the process: one line, and the exit code."""
    os.write(2, b"dlfs: interrupted\n")
    os._exit(CODE)


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process from now on."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)


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
