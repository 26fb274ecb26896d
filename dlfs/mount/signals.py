"""Runs a server's trio program until it ends or a signal ends it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import trio

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")


def run_until_signal(
    program: Callable[_P, Awaitable[object]], *args: _P.args, **kwargs: _P.kwargs
) -> None:
    """Run an asynchronous program; SIGTERM and SIGINT cancel it.

    Raises:
        Exception: the first error of the program, instead of the group that a nursery makes of it.

    Threads: the main thread, which receives signals.
    """

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(_cancel_on_signal, nursery.cancel_scope)
            await program(*args, **kwargs)
            nursery.cancel_scope.cancel()

    try:
        trio.run(run)
    except ExceptionGroup as group:
        raise first_error(group) from group


def first_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error in a group."""
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, ExceptionGroup) else found


async def _cancel_on_signal(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            _log.info("%s: ending", signal.Signals(number).name)
            scope.cancel()
