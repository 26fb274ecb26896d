"""The mount served by the native loop: libdlfs_fuse answers the kernel, this module answers it.

What is below a dataset never changes, so C knows all of it: directory and reader. What may change
(which datasets there are) and what needs words (why a sample cannot be read) it asks here, and the
answers come from the same ``VolumeView`` as those of the other server. A question a second or so is
usual, one for each file never.

A dataset that was removed is withdrawn from the loop, and closed when nobody in it is reading any
more.

Threads: the loop's own; one waits for its end and one for its questions, which are answered on the
trio loop. Ending it waits for requests under way, for as long as a device that hangs is waited for;
the mount itself is gone by then.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from dlfs._native import fuse as native
from dlfs._native.reader import NativeReader
from dlfs.errors import ClosedError, DlfsError, LimitError, NativeError, NotFoundError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.errnos import QUIET, errno_of
from dlfs.mount.permissions import Access
from dlfs.mount.view import ROOT_SECONDS, OpenDataset, ShownVolume, Slot, VolumeView
from dlfs.volume import Volume

THREADS_MAX = 32
"""That answer the kernel: as many reads may wait for devices at the same time."""

HELD_SECONDS = 10.0
"""A sample that is read in parts is held for so long after the last one."""

READ_AHEAD_KIB = 1024
"""Of the kernel, where we may set it: a request is as large as that at most."""

DEVICES = Path("/sys/class/bdi")
"""The kernel's settings of each file system's device."""

_TEND_SECONDS = 1.0
_WAIT_SECONDS = 60.0
_STOP_SECONDS = 1.0  # for requests under way, before the mount is detached without them
_STOP_AGAIN_SECONDS = 0.1

_log = logging.getLogger(__name__)


class NativeMount:
    """A mount that the native loop serves.

    Args:
        volume: borrowed.
        shown: the same, or what shares its datasets with others.
        path: that ``mountpoint.prepare`` gave.
        access: whom the files belong to.
        held_bytes: memory for samples that are read in parts, or ahead.
        words: options of the mount.
        busy_poll_us: a thread stays awake so long for what is about to come; never where the
            program that asks could run only on the same processor.
        handles: have the kernel open files, as if it could not do without.

    Raises:
        NativeError: there is no libdlfs_fuse.
        DeviceError: the system refused the mount.

    Threads: the trio loop.
    """

    def __init__(
        self,
        volume: Volume,
        shown: ShownVolume,
        path: str,
        access: Access,
        *,
        held_bytes: int,
        words: list[str],
        busy_poll_us: int = 0,
        handles: bool = False,
    ) -> None:
        self._volume = volume
        self._path = path
        self._started_ns = time.time_ns()
        self._view = VolumeView(shown, on_removed=self._removed)
        self._ended = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._fuse = native.NativeFuse(
            path,
            native.FuseOptions(
                options=words,
                held_bytes=held_bytes,
                uid=access.uid,
                gid=access.gid,
                file_mode=access.file_mode,
                threads_max=THREADS_MAX,
                root_seconds=ROOT_SECONDS,
                busy_poll_us=busy_poll_us if len(os.sched_getaffinity(0)) > 1 else 0,
                handles=handles,
            ),
        )
        self._device = mountpoints.device_of(path)
        self._answers: dict[int, Callable[[native.FuseQuestion], Awaitable[dict[str, Any]]]] = {
            native.ASK_CHILD: self._child,
            native.ASK_ROOT: self._root,
            native.ASK_LIST: self._list,
            native.ASK_SPACE: self._space,
            native.ASK_OPEN: self._open,
            native.ASK_ERROR: self._explain,
        }

    async def serve(self, on_ready: Callable[[str], None]) -> None:
        """Answer until it is unmounted; cancelled, unmount it.

        Args:
            on_ready: called with the path when the mount answers.

        Raises:
            DeviceError: the loop failed.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for task in (self._wait_for_questions, self._tend, self._stop_when_cancelled):
                    nursery.start_soon(task)
                nursery.start_soon(self._tell_when_ready, on_ready)
                try:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(self._fuse.run)
                finally:
                    self._ended.set()
                    nursery.cancel_scope.cancel()
        finally:
            if mountpoints.device_of(self._path) != self._device:
                self._fuse.abandon()
            self._fuse.close()
            self._view.close()

    async def _tell_when_ready(self, on_ready: Callable[[str], None]) -> None:
        await trio.to_thread.run_sync(
            widen_read_ahead, self._path, self._device, abandon_on_cancel=True
        )
        on_ready(self._path)

    async def _stop_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(_STOP_SECONDS):
                    await self._stop()
                if not self._ended.is_set():
                    _log.warning("%s: detached while requests are under way", self._path)
                    with contextlib.suppress(DlfsError, OSError):
                        await trio.to_thread.run_sync(mountpoints.detach, self._path)
                    await self._stop()

    async def _stop(self) -> None:
        """Have the loop end."""
        while not self._ended.is_set():
            await trio.to_thread.run_sync(self._fuse.stop)
            with trio.move_on_after(_STOP_AGAIN_SECONDS):
                await self._ended.wait()

    # ---- questions -------------------------------------------------------------------------------

    async def _wait_for_questions(self) -> None:
        assert self._nursery is not None
        while True:
            try:
                question = await trio.to_thread.run_sync(self._fuse.wait, _WAIT_SECONDS)
            except ClosedError:
                return  # unmounted
            if question is not None:
                self._nursery.start_soon(self._answer, question)

    async def _answer(self, question: native.FuseQuestion) -> None:
        try:
            fields = await self._answers[question.kind](question)
        except (DlfsError, OSError, MemoryError) as error:
            number = errno_of(error)
            if number not in QUIET:
                _log.error("%s: %s", errno.errorcode.get(number, number), error)
            fields = {"error": number}
        except Exception:  # noqa: BLE001
            # A defect of ours, on a volume nobody thought of: one answer is wrong then, and said to
            # be. Were it raised, the mount would end under all who use it.
            _log.exception(
                "%s: a question of the kernel's failed (kind %d)", self._path, question.kind
            )
            fields = {"error": errno.EIO}
        self._fuse.answer(question.ticket, **fields)

    async def _child(self, question: native.FuseQuestion) -> dict[str, Any]:
        slot = await self._view.child(question.name)
        self._define(slot)
        return {"slot": slot.number}

    async def _root(self, _question: native.FuseQuestion) -> dict[str, Any]:
        with contextlib.suppress(LimitError):  # listing the root will tell
            await self._tell_list()
        return {"modified_ns": await self._view.modified_ns() or self._started_ns}

    async def _list(self, _question: native.FuseQuestion) -> dict[str, Any]:
        await self._tell_list()
        return {}

    async def _tell_list(self) -> None:
        """Say what the root lists; the kernel forgets what it knew if that is new."""
        names, slots = [], []
        for name in await self._view.names():
            try:
                slot = await self._view.child(name)
            except NotFoundError:
                continue  # removed meanwhile
            self._define(slot)
            names.append(name)
            slots.append(slot.number)
        await trio.to_thread.run_sync(self._fuse.list, names, slots)

    async def _space(self, _question: native.FuseQuestion) -> dict[str, Any]:
        return {
            "sample_count": await self._view.sample_total(),
            "capacity_bytes": self._volume.capacity_bytes,
            "free_bytes": self._volume.free_bytes,
        }

    async def _open(self, question: native.FuseQuestion) -> dict[str, Any]:
        slot = self._view.slot(question.slot)
        opened = await self._view.open(slot)
        if not slot.use_count:
            directory = opened.dataset.directory.native
            self._fuse.open(slot.number, directory, _native_reader(opened))
            slot.hold()  # until it is withdrawn
        return {}

    async def _explain(self, question: native.FuseQuestion) -> dict[str, Any]:
        """Tell people why something failed."""
        slot = self._view.slot(question.slot)
        opened = await self._view.open(slot)
        failure = question.failure
        reader = opened.dataset.access.reader
        if failure.member == native.NO_MEMBER:
            raise await trio.to_thread.run_sync(reader.explain_code, failure.code)
        raise await trio.to_thread.run_sync(reader.explain, failure)

    # ---- datasets --------------------------------------------------------------------------------

    def _define(self, slot: Slot) -> None:
        self._fuse.define(
            slot.number,
            version=slot.info.version,
            generation=slot.generation,
            modified_ns=slot.modified_ns,
        )

    def _removed(self, slot: Slot) -> None:
        """Hear that a dataset was removed from the volume."""
        if self._nursery is not None:
            self._nursery.start_soon(self._withdraw, slot)

    async def _withdraw(self, slot: Slot) -> None:
        await trio.to_thread.run_sync(self._fuse.withdraw, slot.number)
        if slot.use_count:
            slot.let_go()

    async def _tend(self) -> None:
        """Give memory up that is not used, and tell of members that were lost."""
        while True:
            await trio.sleep(_TEND_SECONDS)
            self._fuse.expire(HELD_SECONDS)
            for slot in self._view.opened():
                slot.dataset.access.reader.watch_members()


def _native_reader(opened: OpenDataset) -> NativeReader:
    reader = opened.dataset.access.reader.native
    if not isinstance(reader, NativeReader):
        raise NativeError(
            f"serve {opened.dataset!r}: expected its devices in this process; use --fuse=pyfuse3"
        )
    return reader


def widen_read_ahead(path: str, device: str | None) -> None:
    """Let the kernel ask for as much at once as it can, where the system lets us.

    Asks the mount itself, so it is not for the thread that answers questions: only when the mount
    has answered once is the kernel through with choosing a width of its own. Where it was taken
    away meanwhile, what is there now keeps what it has.

    Args:
        path: where it is mounted.
        device: what ``mountpoint.device_of`` said when it was.
    """
    with contextlib.suppress(OSError):
        found = os.stat(path).st_dev
        if f"{os.major(found)}:{os.minor(found)}" == device:
            (DEVICES / device / "read_ahead_kb").write_text(str(READ_AHEAD_KIB))
