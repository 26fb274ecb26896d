"""The devices of this process that do not answer, which are not waited for again and again.

A read under a deadline (``base.deadlines``) that a device left unanswered is noted here, by the
device's URI. Until the device answers, further reads of it by calls with a deadline fail at once,
through whatever object they use it. A thread for each such device opens it again and reads a block,
over and over; an answer, also an error, makes calls ask the device itself again. The thread ends
too when no call has asked for the device for a minute.

Calls without a deadline, such as those of writers, ask the device in any case.

Threads: any at once; each change is one operation on a dictionary. A forked child knows of no
silent device.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dlfs.base.threads import start_thread
from dlfs.errors import DeviceTimeoutError, DlfsError, LimitError

if TYPE_CHECKING:
    from dlfs.block.device import BlockDevice

NOTED_S = 1.0
"""Least time without an answer after which a device counts as silent, in seconds."""

PAUSE_S = 1.0
"""Pause between two questions to a silent device, in seconds."""

UNUSED_S = 60.0
"""Time after the last call that wanted a device until it is no longer asked, in seconds."""

_log = logging.getLogger("dlfs.block")


class _Silence:
    """A device that does not answer, since a time of the monotonic clock."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.wanted_s = time.monotonic()
        self.asked = False


_silent: dict[str, _Silence] = {}
os.register_at_fork(after_in_child=_silent.clear)


def is_silent(uri: str) -> bool:
    """Return True if a device is known not to answer."""
    silence = _silent.get(uri)
    if silence is None:
        return False
    now_s = time.monotonic()
    if not silence.asked and now_s > silence.wanted_s + PAUSE_S:
        _silent.pop(uri, None)  # no thread asks it: the caller does
        return False
    if silence.asked:
        silence.wanted_s = now_s
    return True


def check_answers(uri: str, action: str) -> None:
    """Check that a device is not known to be silent.

    Args:
        uri: URI of the device.
        action: what is to be done with it, for the error.

    Raises:
        DeviceTimeoutError: it is.
    """
    silence = _silent.get(uri)
    if silence is not None and is_silent(uri):
        raise DeviceTimeoutError(
            f"{action}: expected an answer, got none for "
            f"{time.monotonic() - silence.since_s:.1f} s; it is asked again in the background",
            errno.ETIMEDOUT,
        )


def note_silence(
    uri: str, reopen: Callable[[], BlockDevice] | None, *, waited_s: float = 0.0
) -> None:
    """Note that a device does not answer, and have a thread ask it.

    Args:
        uri: URI of the device.
        reopen: opens the device again; None: the next call after a second asks the device.
        waited_s: time for which it was waited for, in seconds.
    """
    silence = _Silence(time.monotonic() - waited_s)
    if _silent.setdefault(uri, silence) is not silence or reopen is None:
        return
    _log.info("%s does not answer: it is asked in the background", uri)
    asking = threading.Thread(
        target=_ask, args=[uri, silence, reopen], name="dlfs-silence", daemon=True
    )
    silence.asked = True
    try:
        start_thread(asking)
    except LimitError:
        silence.asked = False


def note_unanswered(device: BlockDevice, *, waited_s: float | None = None) -> None:
    """Note that a device did not answer.

    Args:
        device: the device.
        waited_s: time for which it was waited for, in seconds; a short one is no silence. None if
            the device itself gave up, after ``operation_timeout_ms``.
    """
    own_s = device.operation_timeout_ms / 1000
    if waited_s is None or waited_s >= NOTED_S:
        reopen = getattr(device, "reopener", None)
        note_silence(device.uri, reopen, waited_s=own_s if waited_s is None else waited_s)


def timeout_error(action: str, limit_s: float) -> DeviceTimeoutError:
    """Return the error of a device that did not answer within a time, in seconds."""
    return DeviceTimeoutError(
        f"{action}: expected an answer within {limit_s:.1f} s, got none", errno.ETIMEDOUT
    )


def _ask(uri: str, silence: _Silence, reopen: Callable[[], BlockDevice]) -> None:
    """Ask a silent device until it answers, or no call wants it any more."""
    device: BlockDevice | None = None
    try:
        while time.monotonic() < silence.wanted_s + UNUSED_S:
            try:
                device = device or reopen()
                device.read(0, device.block_bytes)
                break
            except DeviceTimeoutError:
                time.sleep(PAUSE_S)
            except DlfsError:
                break  # which is an answer
    finally:
        if _silent.get(uri) is silence:
            _silent.pop(uri, None)
        _log.info("%s is no longer taken for silent", uri)
        if device is not None:
            with suppress(DlfsError):
                device.close()
