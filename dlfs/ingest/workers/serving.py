"""``serve_import``: runs the coordinator of an import over sockets and a volume.

One loop in the caller's thread waits for workers' sockets, their processes, and the time; the
``Coordinator`` decides. What waits for devices runs in threads of its own, one call of each kind at
a time: commits, the reading of the coordinator's term, and the end of a worker's right to write.

The loop ends when all parts are committed and all workers have ended; after an error of the import,
when the steps that have arrived are committed. Ctrl-C leaves it at once; workers of this host are
killed, others end with their connection.

Threads: the caller's, and one for each call in progress; none is left behind.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from dlfs.base.threads import start_call
from dlfs.block.device import BlockDevice
from dlfs.block.lease import boot_clock
from dlfs.connection.unfinished import PartProgress
from dlfs.dataset.parts_writer import PartsWriter, WorkerStep
from dlfs.errors import DeviceError, DlfsError, LockedError, StaleError
from dlfs.ingest.workers.connection import ConnectionEndedError
from dlfs.ingest.workers.coordinator import (
    Action,
    Begin,
    Commit,
    Confirm,
    Coordinator,
    Remove,
    Send,
)
from dlfs.ingest.workers.listening import STRANGERS_MAX, Listener, Peer
from dlfs.ingest.workers.messages import (
    AnyMessage,
    End,
    Failed,
    Hello,
    Renewed,
    StartPart,
    unpack_key,
)
from dlfs.ingest.workers.publishing import ProgressSocket

TICK_S = 0.25
"""Longest time between two calls of ``on_tick``, in seconds."""
GONE_POLL_S = 0.02
"""Interval between two looks at whether a killed worker's last write has ended, in seconds."""
GONE_S = 10.0
"""Longest wait for that after an error of the import, in seconds."""
GONE_NOTE_S = 5.0
"""Interval between two notes that this is waited for, in seconds."""
GONE_MAX_S = 300.0
"""Longest wait for that when all parts are committed, in seconds."""
FAILED_S = 2.0
"""Time in which workers end by themselves after an error of the import, in seconds."""
_log = logging.getLogger("dlfs")


class Launcher(Protocol):
    """Starts workers, and starts others in place of those that have ended."""

    def check(self, wanted: int, joined: Mapping[int, Hello]) -> None:
        """Look after the workers; called about four times a second.

        Args:
            wanted: number of workers that could have a part.
            joined: what each worker that has joined says of itself, by its number.

        Raises:
            DlfsError: no worker can be started.
        """

    def close(self) -> None:
        """End all workers, and wait until they have ended."""


@dataclass
class _Dying:
    """A worker that was killed, and of which a write may still be under way.

    Attributes:
        peer: its connection, which has ended, and its process.
        slot: its slot.
        name: its name, for messages.
        killed_s: time at which it was killed.
        noted_s: time of the last note of it.
    """

    peer: Peer
    slot: int
    name: str
    killed_s: float
    noted_s: float


class ImportServer:
    """The sockets, calls and processes of one import.

    Args:
        coordinator: decides.
        writer: commits.
        devices: members of the volume.
        describe: returns the description of a part, and what is before its rest.
        listener: where workers join.
        launcher: starts workers.
        published: where other programs get the progress.
        on_tick: called about four times a second.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        writer: PartsWriter,
        devices: Sequence[BlockDevice],
        describe: Callable[[int, PartProgress], tuple[bytes, bytes]],
        listener: Listener,
        launcher: Launcher,
        published: ProgressSocket,
        on_tick: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._writer = writer
        self._devices = devices
        self._describe = describe
        self._listener = listener
        self._launcher = launcher
        self._published = published
        self._on_tick = on_tick
        self._peers: dict[int, Peer] = {}
        self._numbers: dict[Peer, int] = {}
        self._strangers: set[Peer] = set()
        self._dying: dict[int, _Dying] = {}
        self._calls: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_listening = False
        self._failed_s: float | None = None
        self._has_given_up = False  # on a killed worker whose write does not end

    def run(self) -> None:
        """Run until all parts are committed.

        Raises:
            DlfsError: the import failed; the steps that were committed are kept.
        """
        with ExitStack() as stack:
            stack.callback(self._close)
            self._selector.register(self._wake_read, selectors.EVENT_READ)
            if self._published.listening is not None:
                self._selector.register(self._published.listening, selectors.EVENT_READ)
            while not self._has_ended():
                self._wait()
                self._coordinator.check_time(boot_clock())
                self._look_after()
                self._act(self._coordinator.take_actions())
                self._on_tick()
        if self._coordinator.failure is not None:
            raise self._coordinator.failure

    def _has_ended(self) -> bool:
        coordinator = self._coordinator
        if coordinator.failure is not None:
            self._fail()
        elif coordinator.is_complete:
            coordinator.end("the import is complete")
        else:
            return False
        self._act(coordinator.take_actions())
        return (coordinator.is_idle or self._has_given_up) and not self._calls

    def _fail(self) -> None:
        """Tell workers of the import's error; do not wait for what they read."""
        self._coordinator.end("the import has failed")
        if self._failed_s is None:
            self._failed_s = boot_clock()
        elif boot_clock() - self._failed_s >= FAILED_S:
            self._writer.cancel()
            for number in list(self._peers):
                self._kill(number)

    # ---- events ----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for the next event, and take it."""
        self._listen(len(self._strangers) < STRANGERS_MAX)
        left_s = self._coordinator.next_time() - boot_clock()
        most_s = GONE_POLL_S if self._dying else TICK_S
        for key, events in self._selector.select(max(0.0, min(left_s, most_s))):
            if key.fileobj is self._published.listening:
                self._published.answer()
            elif isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
            elif key.fileobj == self._wake_read:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            else:
                self._serve(key.data, events)
        for call in [call for call in self._calls if call[0].done()]:
            self._calls.remove(call)
            call[1](call[0])

    def _listen(self, wanted: bool) -> None:
        for listening in self._listener.sockets:
            if wanted and not self._is_listening:
                self._selector.register(listening, selectors.EVENT_READ)
            elif self._is_listening and not wanted:
                self._selector.unregister(listening)
        self._is_listening = wanted

    def _accept(self, listening: socket.socket) -> None:
        peer = self._listener.accept(listening, boot_clock())
        if peer is not None:
            self._strangers.add(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: Peer, events: int) -> None:
        """Take what a peer has sent, and send what waits for it."""
        try:
            if events & selectors.EVENT_READ:
                for message in peer.connection.receive():
                    self._take(peer, message)
            if peer.connection.fileno() >= 0:
                self._flush(peer)
        except DlfsError as error:
            self._drop(peer, error)

    def _take(self, peer: Peer, message: AnyMessage) -> None:
        number = self._numbers.get(peer)
        if number is not None:
            self._coordinator.receive(number, message, boot_clock())
        elif peer in self._strangers:
            hello = self._listener.admit(peer, message)
            number = self._coordinator.join(
                hello, boot_clock(), can_be_killed=peer.process is not None
            )
            if number is None:
                raise DeviceError("there are as many workers as there may be")
            self._strangers.discard(peer)
            self._peers[number], self._numbers[peer] = peer, number

    def _drop(self, peer: Peer, error: DlfsError) -> None:
        """End a connection that has ended, or sent what it should not."""
        number = self._numbers.get(peer)
        if number is not None:
            self._coordinator.leave(number, str(error))
            return
        if not isinstance(error, ConnectionEndedError):
            self._listener.note_refusal(error, boot_clock())
            if peer.connection.is_admitted:
                with suppress(DlfsError):
                    peer.connection.send(End(str(error), Failed.of(error, None)))
                    peer.connection.flush()
        self._forget(peer)
        peer.close()

    def _forget(self, peer: Peer) -> None:
        self._strangers.discard(peer)
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)

    def _flush(self, peer: Peer) -> None:
        peer.connection.flush()
        wanted = selectors.EVENT_READ
        if peer.connection.has_unsent:
            wanted |= selectors.EVENT_WRITE
        if peer in self._strangers or peer in self._numbers:
            self._selector.modify(peer.connection, wanted, peer)

    def _look_after(self) -> None:
        """Look after processes: those that shall run, and those that were killed."""
        now_s = boot_clock()
        for peer in [peer for peer in self._strangers if now_s >= peer.until_s]:
            self._drop(peer, DeviceError("it did not prove in time that it may join"))
        for number, dying in list(self._dying.items()):
            if all(device.granted_writers_gone(dying.slot) for device in self._devices):
                del self._dying[number]
                dying.peer.close()
                self._coordinator.gone(number)
            else:
                self._note_dying(dying, now_s)
        if self._coordinator.failure is None and not self._coordinator.is_complete:
            joined = {n: worker.hello for n, worker in self._coordinator.workers.items()}
            self._launcher.check(self._coordinator.wanted_workers, joined)

    def _note_dying(self, dying: _Dying, now_s: float) -> None:
        """Say that a killed worker has not ended; do not wait for it for ever at the end."""
        waited_s = now_s - dying.killed_s
        if now_s - dying.noted_s >= GONE_NOTE_S:
            dying.noted_s = now_s
            _log.warning(
                "import: waiting for the end of %s, which was killed %.0f s ago: a write of it is "
                "still under way",
                dying.name,
                waited_s,
            )
        failure = self._coordinator.failure
        most_s = GONE_MAX_S if failure is None else GONE_S
        if (failure is not None or self._coordinator.is_complete) and waited_s >= most_s:
            self._coordinator.fail(
                LockedError(
                    f"import: expected the end of {dying.name}, which was killed, within "
                    f"{most_s:g} s, but a write of it is still under way; go on with the import "
                    "when it has ended"
                )
            )
            self._has_given_up = True

    # ---- actions ---------------------------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                is_urgent = isinstance(action.message, Renewed)
                self._send(action.worker, action.message, is_urgent=is_urgent)
            elif isinstance(action, Begin):
                description, before = self._describe(action.part, action.before)
                self._send(action.worker, StartPart(action.part, description, before))
            elif isinstance(action, Remove):
                self._remove(action)
            elif isinstance(action, Commit):
                self._commit(action)
            elif isinstance(action, Confirm):
                self._call(self._writer.confirm, self._end_confirm)

    def _send(self, number: int, message: AnyMessage, *, is_urgent: bool = False) -> None:
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            peer.connection.send(message, urgent=is_urgent)
            self._flush(peer)
        except DlfsError as error:
            self._drop(peer, error)

    def _remove(self, action: Remove) -> None:
        """End a worker, and have its right to write end."""
        peer = self._peers.pop(action.worker)
        del self._numbers[peer]
        self._forget(peer)
        peer.connection.close()
        if not action.reason:
            peer.close()
            self._coordinator.gone(action.worker)
            return
        if self._coordinator.failure is None:  # else it is how a worker ends that has failed
            _log.warning("import: lost %s: %s", action.name, action.reason)
        _kill(peer)
        if action.has_deadline:
            peer.close()
            self._coordinator.gone(action.worker)
            if any(action.keys or ()):
                self._call(partial(self._expel, action), self._end_expel)
        else:
            now_s = boot_clock()
            self._dying[action.worker] = _Dying(peer, action.slot, action.name, now_s, now_s)

    def _kill(self, number: int) -> None:
        """Kill a worker of this host; one elsewhere ends with its connection."""
        peer = self._peers[number]
        _kill(peer)
        self._coordinator.leave(number, "the import has failed")

    def _commit(self, action: Commit) -> None:
        def commit() -> None:
            steps = [WorkerStep(str(worker), content) for content, worker in action.contents]
            self._writer.commit(steps, reserve=action.reserve_chunks)

        self._call(commit, self._end_commit)

    def _end_commit(self, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            self._coordinator.committed()
        elif isinstance(error, DlfsError):
            self._coordinator.fail(error)
        else:
            raise error

    def _end_confirm(self, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            self._coordinator.confirmed(call.result())
        elif isinstance(error, StaleError):
            self._coordinator.fail(error)
        elif isinstance(error, DlfsError):
            _log.warning("import: the record cannot be read: %s", error)
            self._coordinator.not_confirmed()
        else:
            raise error

    def _expel(self, action: Remove) -> None:
        """Have the targets refuse the writes of a lost worker's host, if no other one is there."""
        for number, (device, key) in enumerate(zip(self._devices, action.keys or (), strict=True)):
            living = [keys[number] for keys in action.living]
            numbers = [None if each is None else unpack_key(each) for each in (key, *living)]
            device.expel_writer(numbers[0], numbers[1:])

    def _end_expel(self, call: Future[Any]) -> None:
        error = call.exception()
        if isinstance(error, DlfsError):  # the deadline alone decides then
            _log.warning("import: a host cannot be fenced off: %s", error)
        elif error is not None:
            raise error

    def _call(self, function: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        """Run a function that waits for devices; take its result in this thread."""
        made = start_call(function, "dlfs-import")
        self._calls.append((made, then))
        made.add_done_callback(lambda _made: self._wake())

    def _wake(self) -> None:
        with suppress(OSError):  # full: it wakes anyway; closed: the loop has ended
            os.write(self._wake_write, b"\0")

    # ---- the end ---------------------------------------------------------------------------------

    def _close(self) -> None:
        """Kill what is left of workers, and wait for calls in progress."""
        for peer in [*self._peers.values(), *self._strangers]:
            _kill(peer)
        self._launcher.close()
        self._writer.cancel()
        for call, _ in self._calls:
            call.exception()
        if not self._coordinator.grants_expire and self._are_all_gone():
            self._coordinator.all_gone()
        for peer in [
            *self._peers.values(),
            *self._strangers,
            *(dying.peer for dying in self._dying.values()),
        ]:
            peer.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _are_all_gone(self) -> bool:
        """Wait until no write of a killed worker is in flight; return False if one stays."""
        until_s = boot_clock() + GONE_S
        while not all(device.granted_writers_gone() for device in self._devices):
            if boot_clock() >= until_s:
                return False
            time.sleep(GONE_POLL_S)
        return True


def _kill(peer: Peer) -> None:
    if peer.process is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(peer.process.value, signal.SIGKILL)
