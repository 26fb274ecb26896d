"""Starts threads, and names what is short where the system refuses one.

``threading`` raises ``RuntimeError`` then, which tells a user nothing: DLFS raises ``LimitError``.

Imports only the standard library, ``dlfs.base.forks`` and ``dlfs.errors``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import suppress
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from dlfs.base.forks import OwnerProcess
from dlfs.errors import LimitError

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
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


WAIT_S = 0.2
"""Time between two calls of a function that is called during another one, in seconds."""


def start_call(call: Callable[[], T], name: str = "dlfs-call") -> Future[T]:
    """Run a call in a thread of its own, which does not keep the process from ending.

    Args:
        call: what to run.
        name: name of the thread.

    Returns:
        A future of its result.

    Raises:
        LimitError: the system refuses a thread.
    """
    made: Future[T] = Future()
    context = copy_context()

    def run() -> None:
        try:
            made.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            made.set_exception(error)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    return made


def has_ended(made: Future[Any], seconds: float) -> bool:
    """Wait for the end of a call, for a time at most; return True if it has ended.

    ``concurrent.futures.wait`` would leave the result, with all its descriptors, to the cyclic
    garbage collector if Ctrl-C ends it.
    """
    with suppress(TimeoutError):
        made.exception(seconds)
    return made.done()


def run_waiting(call: Callable[[], T], tick: Callable[[], object]) -> T:
    """Run a call that takes long outside of Python, and call a function again and again meanwhile.

    What that function raises, and Ctrl-C, ends the wait at once. The call then ends by itself, and
    its result is dropped.

    Args:
        call: runs in a thread of its own.
        tick: runs in this thread, every ``WAIT_S``.

    Raises:
        LimitError: the system refuses a thread.
    """
    made = start_call(call)
    while not has_ended(made, WAIT_S):
        tick()
    return made.result()


def run_in_time(call: Callable[[], T], seconds: float) -> T:
    """Run a call that may hang, such as one to a dead file system, with a time limit.

    One that does not return in time keeps its thread, which does not keep the process from ending:
    the kernel lets a process be killed in a wait for NFS or FUSE.

    Args:
        call: runs in a thread of its own; what it raises is raised here.
        seconds: longest time to wait for it.

    Raises:
        TimeoutError: it has not returned in time.
        LimitError: the system refuses a thread.
    """
    made = start_call(call)
    if not has_ended(made, seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    return made.result()


def map_waiting(call: Callable[[Item], T], items: Iterable[Item], threads: int) -> list[T]:
    """Call a function for each item, several at a time, and return the results in order.

    Ctrl-C, and the first error, end the wait at once, whatever calls wait for. No call begins then;
    those in progress end by themselves, in threads that do not keep the process from ending.

    Args:
        call: runs in threads of its own.
        items: its arguments.
        threads: most calls at a time.

    Raises:
        LimitError: the system refuses a thread.
    """
    given = list(items)
    left = deque(enumerate(given))
    results: dict[int, T] = {}

    def run() -> None:
        while True:
            try:
                number, item = left.popleft()
            except IndexError:
                return
            results[number] = call(item)

    try:
        workers = [start_call(run) for _ in range(min(threads, len(given)))]
        for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
            worker.result()
    finally:
        left.clear()
    return [results[number] for number in range(len(given))]


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose ``submit`` raises LimitError if the system refuses a thread.

    No call runs once ``shutdown`` has returned or raised, be it by Ctrl-C. A ThreadPoolExecutor
    forgets a thread whose start Ctrl-C interrupts, and that thread runs on.
    """

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._name = thread_name_prefix
        self._owner = OwnerProcess()  # a child has none of the threads
        self._changed = threading.Condition()
        self._running = 0
        self._ended = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        """Submit a call; see ``ThreadPoolExecutor.submit``."""
        try:
            return super().submit(self._run, function, *args, **named)
        except RuntimeError as error:
            raise _refusal(self._name, error) from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and wait for those that run; see ``ThreadPoolExecutor.shutdown``."""
        try:
            super().shutdown(wait, cancel_futures=cancel_futures)
        finally:
            if wait and self._owner.is_current():
                with self._changed:
                    self._ended = True
                    self._changed.wait_for(lambda: not self._running)

    def _run(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        with self._changed:
            if self._ended:
                raise CancelledError
            self._running += 1
        try:
            return function(*args, **named)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


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
