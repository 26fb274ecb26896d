"""The command line: ``dlfs VERB ...``, or ``python -m dlfs.cli VERB ...``.

This module handles Ctrl-C before it loads anything else: it and ``dlfs`` import only modules that
the interpreter has loaded already. While Python itself starts, Python handles Ctrl-C.

``main`` lets Ctrl-C end the process with one line and exit code 130. Before and after a verb there
is nothing to undo. While a verb runs, ``dlfs.cli.interrupts`` lets Ctrl-C interrupt it instead. A
process that was started with SIGINT ignored continues to ignore it.
"""

import _signal  # type: ignore[import-not-found]  # signal is written in Python, and loads enum
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

COLLECTION_THRESHOLD = 100_000
"""Number of new objects behind which Python looks for garbage."""
CODE = 130
"""Exit code of an interrupted command; ``dlfs.cli.exits`` has it too, but takes longer to load."""


def end(_number: int = _signal.SIGINT, _frame: "FrameType | None" = None) -> "NoReturn":
    """End the process with one line and the exit code."""
    try:
        os.write(2, b"dlfs: interrupted\n")
    finally:  # stderr may be closed, or full
        os._exit(CODE)


def main() -> None:
    """Run the command line, and exit."""
    try:
        if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
            _signal.signal(_signal.SIGINT, end)
        import gc

        # Importing makes many objects and no garbage: by default, Python looks for some 90 times.
        gc.set_threshold(COLLECTION_THRESHOLD)
        # No verb uses the threads of OpenBLAS, which start with numpy, one for each processor.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from dlfs.cli.streams import prepare_streams, use_utf8

        use_utf8()
        prepare_streams()
        from dlfs.cli.commands import app

        app()
    except KeyboardInterrupt:
        end()
