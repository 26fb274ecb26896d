"""Mounts at target paths: makes them, finds them, asks them, and detaches them.

A mount is one of DLFS, or a bind mount of the directory of a socket of the node service
(``sockets``). A volume is mounted on a stage, a directory of the driver. When its server answers,
the mount, or the directory of a dataset in it, is shown at the target (a bind mount), and the stage
is cleared: so a target never shows what is not ready, or more than its dataset. Nobody but a server
answers a request below such a mount, so whatever makes one runs in a thread that is not waited for
longer than the call has time (``Questions``). A server is not trusted either: links are not
followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dlfs._native.mounting import BIND, mount, mount_beneath
from dlfs.errors import DeviceError
from dlfs.mount.mountpoint import (
    FILE_SYSTEM_TYPE,
    MOUNTINFO,
    MountRecord,
    detach,
    mount_file_system,
    parse_mountinfo,
)
from dlfs.mount.native_server import widen_read_ahead
from dlfs.mount.options import MountOptions
from dlfs_csi.failures import CallError, Code

_ENDED = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED)
_LAYERS_MAX = 16
SOCKET_PREFIX = "csi-"
"""Beginning of the names of the node service's sockets that the driver has it publish."""
_SOCKET_ROOT = re.compile(
    rb".*/" + SOCKET_PREFIX.encode() + rb"[0-9a-f]{32}(//deleted)?", re.DOTALL
)


class State(Enum):
    """State of a mount, by its answer to a question."""

    ANSWERS = "answers"
    SILENT = "no answer"
    DEAD = "dead"


@dataclass(frozen=True)
class Answer:
    """An answer of a mount to ``statvfs``.

    Attributes:
        state: what it is.
        space: its space and numbers of files; None unless the mount answers.
    """

    state: State
    space: os.statvfs_result | None = None


def layers(target: str) -> list[MountRecord]:
    """Return the mounts on a target path, from the lowest to the topmost."""
    wanted = os.fsencode(target)
    return [
        record for record in parse_mountinfo(MOUNTINFO.read_bytes()) if record.mountpoint == wanted
    ]


def is_ours(record: MountRecord) -> bool:
    """Return True if a mount is one that the driver makes."""
    return record.file_system_type == FILE_SYSTEM_TYPE or bool(_SOCKET_ROOT.fullmatch(record.root))


def prepare(target: str) -> None:
    """Make the directory of a target, or check that it can be mounted on.

    Raises:
        CallError: FAILED_PRECONDITION: something else is there.
    """
    if os.path.realpath(target) != target:
        raise _unexpected(target, f"a symbolic link on the way to {os.path.realpath(target)}")
    foreign = [record.file_system_type for record in layers(target) if not is_ours(record)]
    if foreign:
        raise _unexpected(target, f"a mount of type {foreign[0]}")
    try:
        os.makedirs(target, mode=0o750, exist_ok=True)
        if os.listdir(target):
            raise _unexpected(target, "files in it")
    except OSError as error:
        raise _unexpected(target, error.strerror or str(error)) from error


def _unexpected(target: str, got: str) -> CallError:
    return CallError(
        Code.FAILED_PRECONDITION,
        f"publish at {target}: expected a path that can be made an empty directory, got {got}",
    )


def mount_stage(stage: str) -> tuple[int, str]:
    """Mount a file system that no server answers yet.

    Returns:
        The descriptor of ``/dev/fuse``, and the number of the device.

    Raises:
        DeviceError: the system refused.
    """
    os.makedirs(stage, mode=0o700)
    kernel = mount_file_system(stage, MountOptions(allow_other=True).for_kernel())
    try:
        return kernel, layers(stage)[-1].device
    except IndexError:
        os.close(kernel)
        raise DeviceError(f"mount on {stage}: it was unmounted at once") from None


def clear_stage(stage: str) -> None:
    """Detach the mount on a stage, and remove the directory, if they are there.

    Raises:
        DeviceError: the system refuses.
    """
    detach_all(stage)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(stage)


def show(stage: str, dataset: str, target: str) -> None:
    """Mount a volume, or the directory of a dataset, from its stage at a target.

    It takes the place of a dead mount there: programs never see the directory below.

    Args:
        stage: the stage, whose server answers.
        dataset: name of the dataset; empty: the whole volume.
        target: the target.

    Raises:
        FileNotFoundError: there is no such dataset.
        NotADirectoryError: the server gives something else than a directory.
        OSError: the mount does not answer any more.
    """
    for found in layers(stage):  # which a server without rights cannot
        if found.file_system_type == FILE_SYSTEM_TYPE:
            widen_read_ahead(stage, found.device)
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    directory = os.open(os.path.join(stage, dataset) if dataset else stage, flags)
    try:
        if any(map(is_ours, layers(target))):
            mount_beneath(directory, target)
            detach(target)
        else:
            mount(f"/proc/self/fd/{directory}", target, "", BIND, "")
    finally:
        os.close(directory)


def detach_all(target: str) -> None:
    """Detach all mounts of the driver on a target, the topmost first, also if files are open.

    Raises:
        DeviceError: the system refuses.
    """
    for _ in range(_LAYERS_MAX):
        found = layers(target)
        if not found or not is_ours(found[-1]):
            return
        detach(target)
    raise DeviceError(f"unmount {target}: expected at most {_LAYERS_MAX} mounts there")


def remove(target: str) -> None:
    """Remove the directory of a target, if it is there and empty.

    Raises:
        CallError: FAILED_PRECONDITION: it is not empty, or cannot be removed.
    """
    try:
        os.rmdir(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CallError(
            Code.FAILED_PRECONDITION,
            f"unpublish {target}: expected an empty directory without a mount, got "
            f"{error.strerror}",
        ) from error


class Questions:
    """Calls that a mount answers, each in a thread of its own, at most one a target at a time.

    A call that is not answered in time stays, and ends when the mount answers or is dead; until
    then the target is silent.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, threading.Thread] = {}

    def ask(self, target: str, call: Callable[[], object]) -> queue.SimpleQueue[object] | None:
        """Start a call.

        Returns:
            A queue, which gets the result or the OSError; None if an earlier call is pending.
        """
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()

        def run() -> None:
            try:
                result = call()
            except OSError as error:
                result = error
            with self._lock:
                self._pending.pop(target, None)
            answers.put(result)

        with self._lock:
            if target in self._pending:
                return None
            thread = threading.Thread(target=run, daemon=True, name=f"ask {target}")
            self._pending[target] = thread
        try:
            thread.start()
        except RuntimeError:  # no room for another thread
            with self._lock:
                self._pending.pop(target, None)
            return None
        return answers

    def state(self, target: str, timeout_s: float) -> Answer:
        """Return what a mount answers within a time, in seconds."""
        answers = self.ask(target, lambda: os.statvfs(target))
        result: object = None
        if answers is not None:
            with contextlib.suppress(queue.Empty):
                result = answers.get(timeout=timeout_s)
        return answer_of(result)


def answer_of(result: object) -> Answer:
    """Return the answer that the result of ``statvfs`` is; None: there is none yet."""
    if isinstance(result, os.statvfs_result):
        return Answer(State.ANSWERS, result)
    if isinstance(result, OSError):
        return Answer(State.DEAD if result.errno in _ENDED else State.SILENT)
    return Answer(State.SILENT)
