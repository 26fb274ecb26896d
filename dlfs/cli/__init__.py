"""The command line: ``dlfs VERB ...``, or ``python -m dlfs.cli VERB ...``.

This module answers Ctrl-C before anything else is loaded: it and ``dlfs`` import only what the
interpreter has loaded already. While Python itself starts, Ctrl-C is answered by Python.

``main`` lets Ctrl-C end the process: one line, exit code 130. Before a verb runs and behind it
there is nothing to undo. While a verb runs, ``dlfs.cli.interrupts`` lets Ctrl-C interrupt it
instead. A process that was started with SIGINT ignored goes on ignoring it.
"""

import _signal  # type: ignore[import-not-found]  # signal is written in Python, and loads enum
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

CODE = 130
"""Exit code of an interrupted command (``dlfs.cli.exits``, which takes longer to load)."""


def end(_number: int = _signal.SIGINT, _frame: "FrameType | None" = None) -> "NoReturn":
    """End the process: one line, and the exit code."""
    os.write(2, b"dlfs: interrupted\n")
    os._exit(CODE)


def main() -> None:
    """Run the command line, and exit."""
    try:
        if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
            _signal.signal(_signal.SIGINT, end)
        from dlfs.cli.commands import app

        app()
    except KeyboardInterrupt:
        end()
