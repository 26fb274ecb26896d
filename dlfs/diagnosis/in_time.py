"""``in_time``: a call that may hang, such as one to a dead file system, with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

from dlfs.base.threads import start_thread

T = TypeVar("T")


def in_time(function: Callable[[], T], seconds: float) -> T:
    """Call a function in a thread, and return its result.

    A function that does not return in time keeps its thread, which does not keep the process from
    ending: the kernel lets a process be killed in a wait for NFS or FUSE.

    Args:
        function: the function; what it raises is raised here.
        seconds: longest time to wait for it.

    Raises:
        TimeoutError: it has not returned in time.
        LimitError: the system refuses a thread.
    """
    result: Future[T] = Future()
    context = copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001  raised by result()
            result.set_exception(error)

    thread = threading.Thread(target=run, name="dlfs-diagnosis", daemon=True)
    start_thread(thread).join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result.result()
