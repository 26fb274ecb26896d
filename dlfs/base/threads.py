"""Starts threads, and names what is short where the system refuses one.

``threading`` raises ``RuntimeError`` then, which tells a user nothing: DLFS raises ``LimitError``.

Imports only the standard library and ``dlfs.errors``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from dlfs.errors import LimitError

P = ParamSpec("P")
T = TypeVar("T")
_REFUSED = "can't start new thread"
"""Message of threading's error when the system refuses a thread."""


def start_thread(thread: threading.Thread) -> threading.Thread:
    """Start a thread, and return it.

    Raises:
        LimitError: the system refuses another thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise _refusal(thread.name, error) from error
    return thread


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose ``submit`` raises LimitError if the system refuses a thread."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        """Submit a call; see ``ThreadPoolExecutor.submit``."""
        try:
            return super().submit(function, *args, **named)
        except RuntimeError as error:
            raise _refusal(str(getattr(self, "_thread_name_prefix", "")), error) from error


def _refusal(name: str, error: RuntimeError) -> Any:
    """Return the error of a refused thread; any other error as it is.

    Ctrl-C in the moment in which ``threading`` takes a lock back has it release what it has not.
    """
    if isinstance(error.__context__, KeyboardInterrupt):
        return KeyboardInterrupt()
    if str(error) != _REFUSED:
        return error
    return LimitError(
        f"start the thread {name}: the system allows no more threads or processes to this user "
        "or container; 'ulimit -u' and the pids limit of its control group tell how many"
    )
