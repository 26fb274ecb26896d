"""Calls in forked children."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import TypeVar

SECONDS_MAX = 100
"""Longest time of a child, in seconds; slow test machines need it."""

T = TypeVar("T")


def run_forked(call: Callable[..., object], *arguments: object) -> int:
    """Run a call in a forked child, and return the child's exit status.

    The status is 1 if the call raised, with its traceback on stderr: the child never goes on with
    the tests. It is that of a signal (negative) if one ended the child, as after ``SECONDS_MAX``.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS_MAX)
        status = 1
        try:
            call(*arguments)
            status = 0
        except BaseException:  # noqa: BLE001 - pytest's outcomes are none of Exception
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def call_forked(call: Callable[..., T], *arguments: object) -> T:
    """Return what a call in a forked child returns."""
    with tempfile.TemporaryFile() as file:

        def work() -> None:
            file.write(pickle.dumps(call(*arguments)))
            file.flush()

        assert run_forked(work) == 0
        file.seek(0)
        result: T = pickle.load(file)
        return result
