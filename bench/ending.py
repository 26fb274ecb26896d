"""How a program of the benchmark ends early: by Ctrl-C, and by SIGTERM or SIGHUP just as well.

``run_program`` raises all three signals as KeyboardInterrupt, so that a benchmark undoes on the
way out what it began: it removes its data, unmounts, and ends its services. Ctrl-C reaches all
processes of a terminal at once, SIGTERM perhaps only one: ``started`` starts every other program
that a benchmark needs, ends it with its block, and waits until it has cleaned up.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130
"""A shell's exit code for what Ctrl-C ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupt:
    """Signal handler that raises KeyboardInterrupt, at once or when it is no longer held back."""

    def __init__(self) -> None:
        self._ending = self._held = self._came = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._ending and number != signal.SIGINT:
            return  # the program cleans up already
        self._ending = True
        self._came = self._held
        if not self._held:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Hold signals back until ``release``."""
        self._held = True

    def release(self) -> None:
        """Raise KeyboardInterrupt if a signal came while signals were held back."""
        came, self._held, self._came = self._came, False, False
        if came:
            raise KeyboardInterrupt


_interrupt = _Interrupt()


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program until it ends, or a signal ends it, and exit by its code.

    A signal that the process was started to ignore stays ignored: ``nohup`` and a shell's ``&``
    rely on it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program, and end it with the block: send SIGTERM, then wait until it has ended.

    A signal that arrives while the program starts is raised within the block, so that no program is
    left behind.

    Args:
        command: the program and its arguments.
        options: of ``subprocess.Popen``.

    Raises:
        OSError: the program cannot be started.
    """
    _interrupt.hold()
    try:
        process = subprocess.Popen(command, **options)
    except BaseException:
        _interrupt.release()
        raise
    try:
        _interrupt.release()
        yield process
    finally:
        process.terminate()  # does nothing to one that has ended
        process.communicate()
