"""How a program of the benchmark ends early: by Ctrl-C, and by SIGTERM or SIGHUP just as well.

All three are raised as KeyboardInterrupt, so that what was begun is undone on the way out: data is
removed, mounts and services end. SIGTERM may reach one process only: who waits for another program
of the benchmark ends it and lets it clean up first (``output_of``). Ctrl-C reaches all of them at
once; what a parent sends besides is then no news.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130
"""A shell's exit code for what Ctrl-C ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program until it ends, or a signal ends it, and exit by its code.

    What the process was started to ignore, it ignores: ``nohup`` and a shell's ``&`` rely on it.
    """
    ending = False

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if ending and number != signal.SIGINT:
            return  # it cleans up
        ending = True
        raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def output_of(process: subprocess.Popen[Any]) -> tuple[Any, Any]:
    """What a process writes into its pipes until it ends, as ``communicate``.

    Raises:
        KeyboardInterrupt: this process was interrupted; the other was told, and has ended.
    """
    try:
        return process.communicate()
    except KeyboardInterrupt:
        process.terminate()
        process.communicate()
        raise
