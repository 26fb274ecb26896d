"""``Link``: a worker's connection to the coordinator, served by a thread of its own.

So requests for time leave while the worker packs, reads or waits for its source. The thread limits
the writes of the worker's devices as the coordinator's answers say. The worker's own thread asks
for chunks and reports steps by the methods of ``Link``, which wait for the coordinator as long as
the worker may go on.

If the worker is to end and its own thread does not notice, because its source or device hangs, a
process that is a worker alone is ended after ``GRACE_S``.

Threads: as said; any may call the methods.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from dlfs.base.forks import Lock
from dlfs.base.threads import start_thread
from dlfs.block.device import BlockDevice
from dlfs.block.lease import boot_clock
from dlfs.dataset.step_content import StepContent
from dlfs.errors import DeviceTimeoutError, DlfsError
from dlfs.format.geometry import ChunkRun
from dlfs.ingest.workers.connection import Connection
from dlfs.ingest.workers.invitation import CONNECT_S, Invitation
from dlfs.ingest.workers.messages import (
    Failed,
    Hello,
    ProgressMade,
    Renew,
    StartPart,
    Welcome,
    from_coordinator,
    pack_key,
)
from dlfs.ingest.workers.worker import Worker

GRACE_S = 10.0
"""Time in which the worker's own thread must notice that it is to end, in seconds."""
LINGER_S = 10.0
"""Longest time in which the last messages are sent, in seconds."""
_log = logging.getLogger("dlfs")


class WorkerEndedError(Exception):
    """The worker is to end: it was told, or may not write any more."""


class Link:
    """The connection of one worker. A context manager, which ends it.

    Args:
        invitation: from the coordinator.
        make_hello: returns what the worker says of itself, given the secret.
        ends_process: True to end the process if its own thread does not notice that it is to end.

    Raises:
        DeviceError: nothing listens at the address, or the connection ended.
        UsageError: something else listens there.
    """

    def __init__(
        self,
        invitation: Invitation,
        make_hello: Callable[[bytes], Hello],
        *,
        ends_process: bool = False,
    ) -> None:
        self._ends_process = ends_process
        connected, context = invitation.connect()
        self._connection = Connection(connected, from_coordinator, context=context)
        try:
            self._shake_hands()
            if context is not None:
                invitation.check_certificate(self._connection.certificate())
            hello = make_hello(bytes.fromhex("" if context is None else invitation.secret))
            self._worker = Worker(hello, boot_clock())
            self._changed = threading.Condition(Lock())
            self._devices: Sequence[BlockDevice] = ()
            self._incarnations: dict[int, list[int]] = {}
            self._limited_s: float | None = None
            self._is_closing = False
            self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._end_s: float | None = None
            self._thread = threading.Thread(target=self._run, name="dlfs-worker", daemon=True)
            start_thread(self._thread)
        except BaseException:
            self._connection.close()
            raise

    def _shake_hands(self) -> None:
        """Complete TLS."""
        until_s = boot_clock() + CONNECT_S
        while not self._connection.has_handshaken:
            self._connection.flush()
            self._poll(until_s)
            self._connection.receive()

    def _poll(self, until_s: float) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(max(0.0, until_s - boot_clock()) * 1000):
            raise DeviceTimeoutError(
                f"join an import: no answer within {CONNECT_S:g} s", errno.ETIMEDOUT
            )

    # ---- for the worker's own thread -------------------------------------------------------------

    @property
    def failure(self) -> DlfsError | None:
        """The error of the import, or of this worker's joining; None without."""
        with self._changed:
            told = self._worker.failure
            return None if told is None else told.error()

    @property
    def is_lost(self) -> bool:
        """True if the worker is to end because it has no right to write any more."""
        with self._changed:
            return self._worker.is_lost

    @property
    def goes_on(self) -> bool:
        """True if the worker was told to end, and the import goes on without it."""
        with self._changed:
            return self._worker.goes_on

    def welcome(self) -> Welcome:
        """Wait for the coordinator's answer, and return it.

        Raises:
            WorkerEndedError: there is none.
        """
        self._wait_until(lambda: self._worker.welcome is not None)
        assert self._worker.welcome is not None
        return self._worker.welcome

    def be_ready(self, devices: Sequence[BlockDevice]) -> None:
        """Report that devices are open for granted writing; wait for the right to write to them.

        From now on their writes are limited as the coordinator's answers say.

        Raises:
            WorkerEndedError: the worker is to end.
        """
        keys = [None if (key := each.writer_key) is None else pack_key(key) for each in devices]
        with self._changed:
            self._devices = devices
            self._worker.be_ready(keys, boot_clock())
            self._wake()
        self._wait_until(lambda: self._worker.is_permitted)

    def next_part(self) -> StartPart | None:
        """Wait for the next part, and return it; None if the worker is to end, as it was told."""
        try:
            self._wait_until(lambda: self._worker.part is not None)
        except WorkerEndedError:
            if self._worker.is_lost:
                raise
            return None
        return self._worker.part

    def take(self, count: int) -> ChunkRun:
        """Return granted chunks, 1 to ``count``; wait for them.

        Raises:
            WorkerEndedError: the worker is to end.
        """
        with self._changed:
            if not self._worker.has_chunks:
                self._worker.ask_for_chunks(count, is_waiting=True)
                self._wake()
        self._wait_until(lambda: self._worker.has_chunks)
        with self._changed:
            run = self._worker.take(count)
            self._wake()
            return run

    def report(self, content: StepContent) -> None:
        """Report a step; wait while too many are not committed.

        Raises:
            WorkerEndedError: the worker is to end.
        """
        self._wait_until(lambda: self._worker.may_report)
        with self._changed:
            self._worker.report(content)
            self._wake()

    def wait_for_commits(self) -> None:
        """Wait until all steps that were reported are committed.

        Raises:
            WorkerEndedError: the worker is to end.
        """
        self._wait_until(lambda: self._worker.is_committed)

    def report_progress(self, progress: ProgressMade) -> None:
        """Report how far the part is.

        Raises:
            WorkerEndedError: the worker is to end.
        """
        self._wait_until(lambda: True)
        with self._changed:
            self._worker.report_progress(progress)
            self._wake()

    def report_failure(self, error: Exception) -> None:
        """Report an error that ends the import."""
        with self._changed:
            part = self._worker.part
            self._worker.report_failure(Failed.of(error, None if part is None else part.part))
            self._wake()

    def report_end(self) -> None:
        """Report that no write is in flight, and none will follow."""
        with self._changed:
            self._worker.report_end()
            self._wake()

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        with self._changed:
            while self._worker.is_lost or not is_true():
                if self._worker.end is not None:
                    raise WorkerEndedError(self._worker.end)
                self._changed.wait()

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread wakes anyway; closed: it has ended
            os.write(self._wake_write, b"\0")

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._send()
                if self._has_finished():
                    return
                poll = select.poll()
                poll.register(self._wake_read, select.POLLIN)
                if not self._worker.is_lost:
                    unsent = select.POLLOUT if self._connection.has_unsent else 0
                    poll.register(self._connection, select.POLLIN | unsent)
                left_s = self._next_time() - boot_clock()
            ready = dict(poll.poll(max(0.0, left_s) * 1000 + 1))
            with self._changed:
                self._take(ready)
                self._changed.notify_all()
            self._end_if_stuck()

    def _take(self, ready: dict[int, int]) -> None:
        """Take what has come, and do what is due."""
        worker = self._worker
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        try:
            if self._connection.fileno() in ready:
                for message in self._connection.receive():
                    worker.receive(message, boot_clock())
        except DlfsError as error:
            worker.leave(str(error))
        worker.check_time(boot_clock())
        self._apply()

    def _send(self) -> None:
        try:
            for outgoing in self._worker.take_messages():
                if isinstance(outgoing.message, Renew):
                    self._note_request(outgoing.message.number)
                self._connection.send(outgoing.message, urgent=outgoing.is_urgent)
            self._connection.flush()
        except DlfsError as error:
            self._worker.leave(str(error))

    def _apply(self) -> None:
        """Limit the writes of the devices as the coordinator's last answer says."""
        worker = self._worker
        if worker.deadline_s is None or worker.deadline_s == self._limited_s:
            return
        self._limited_s = worker.deadline_s
        incarnations = self._incarnations.get(worker.deadline_request, [])
        for device, incarnation in zip(self._devices, incarnations, strict=True):
            device.extend_grant(worker.deadline_s, incarnation=incarnation)
        for number in [
            number for number in self._incarnations if number <= worker.deadline_request
        ]:
            del self._incarnations[number]

    def _note_request(self, number: int) -> None:
        """Note which connections the devices have before a request for time is sent."""
        if any(device.grants_expire for device in self._devices):
            self._incarnations[number] = [device.incarnation() for device in self._devices]

    def _next_time(self) -> float:
        times = [self._worker.next_time()]
        if self._end_s is not None:
            times.append(self._end_s)
        return boot_clock() + 1.0 if self._worker.end is not None else min(times)

    def _has_finished(self) -> bool:
        return self._is_closing and (self._worker.is_lost or not self._connection.has_unsent)

    def _end_if_stuck(self) -> None:
        """End the process if its own thread does not notice that it is to end."""
        if self._worker.end is None or self._is_closing or not self._ends_process:
            return
        if self._end_s is None:
            self._end_s = boot_clock() + GRACE_S
        elif boot_clock() >= self._end_s:
            _log.warning("it hangs, and is ended: %s", self._worker.end)
            os._exit(1)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is to be sent, and end the connection; closing it again does nothing."""
        with self._changed:
            self._is_closing = True
            self._wake()
        self._thread.join(LINGER_S)
        self._connection.close()
        if not self._thread.is_alive():
            for end in (self._wake_read, self._wake_write):
                if end >= 0:
                    os.close(end)
            self._wake_read = self._wake_write = -1

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
