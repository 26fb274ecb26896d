"""Serves a mount that the holder has: ``dlfs mount --holder FOLDER``, in the foreground.

The keeper takes the mount from the holder (``holder``) and starts servers, one after the other, as
a keeper does that has mounted it. But the mount stays when the keeper ends: the holder gives it to
the next keeper. So SIGTERM ends keeper and server at once, and leaves requests under way to the
next server. The processes may be without any rights, and in namespaces in which the mount is not
seen: that it was unmounted shows at its descriptor.

All processes that have the descriptor have the connection to the holder, too, and a server dies
with its keeper. So the end of the connection shows the holder that nothing of them is left. If the
holder ends, the keeper connects to the next one, and gives back what it has.

Threads: the main thread of a process without others.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dlfs.base.json_records import parse_json, to_json
from dlfs.errors import (
    DeviceError,
    DlfsError,
    LockedError,
    NotFoundError,
    UsageError,
    restore_error,
)
from dlfs.mount.descriptors import close_all, is_connected, receive, unanswered_init
from dlfs.mount.options import MountOptions, OnReady
from dlfs.mount.server import serve
from dlfs.mount.supervise.background import MountRequest
from dlfs.mount.supervise.holder import (
    GONE,
    MESSAGE_BYTES_MAX,
    SERVER,
    check_answer,
    connect,
    parse,
    send,
)
from dlfs.mount.supervise.inherited import DatasetNumbers, InheritedMount
from dlfs.mount.supervise.keeper import SIGNALS, Keeper, Server, can_keep

HOLDER_SECONDS = 10.0
"""Longest wait for a holder that does not run, in seconds."""
RECONNECT_SECONDS = 0.5
"""Time between two attempts to give a mount back to the holder, in seconds."""
_WAIT_SECONDS = 0.25
_QUIET_SECONDS = 1.0
_LOG_SECONDS = 60.0

_log = logging.getLogger(__name__)


class HolderLink:
    """The connection of a keeper to the holder of one mount.

    Args:
        folder: the folder of the mount, which ``holder.deposit`` has returned.

    Attributes:
        kernel: descriptor of ``/dev/fuse``.
        numbers: the numbers of the datasets.
        init: the kernel's first request; empty if no server has read it.
        name: the name of the mount.
        device: device number of the mount.
        answers: a server of this process answers.
        refused: why the mount belongs to another process; None if it does not.

    Threads: one.
    """

    kernel: int
    numbers: DatasetNumbers
    init: bytes
    name: str
    device: str

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.abspath(folder)
        self._link: socket.socket | None = None
        self._action = f"serve the mount of {self._folder}"
        self._next_s = 0.0  # time of the next attempt to connect
        self._last = ""
        self.answers = False
        self.refused: str | None = None

    def take(self, is_ending: Callable[[], bool]) -> bool:
        """Wait until the holder gives the mount.

        Args:
            is_ending: returns True if this process is to end.

        Returns:
            False if the mount was unmounted or dropped meanwhile, or the process is to end.

        Raises:
            NotFoundError: the folder is not there, or no holder runs for ``HOLDER_SECONDS``.
            UsageError: this user may not serve the mount.
            LimitError: too many servers wait for it.
            DeviceError: the holder cannot be reached.
        """
        if not os.path.isdir(self._folder):
            raise NotFoundError(
                f"{self._action}: no such folder; expected FOLDER/mounts/NAME of a holder "
                "('dlfs hold FOLDER') that has the mount NAME"
            )
        deadline = time.monotonic() + HOLDER_SECONDS
        log_s = math.inf
        while not is_ending():
            link = self._connect()
            if link is None:
                if time.monotonic() > deadline:
                    raise NotFoundError(f"{self._action}: its holder does not run")
                time.sleep(_WAIT_SECONDS)
                continue
            log_s = min(log_s, time.monotonic() + _QUIET_SECONDS)
            with contextlib.suppress(OSError):
                send(link, {"op": "serve"})
            while not is_ending() and not select.select([link], [], [], _WAIT_SECONDS)[0]:
                if time.monotonic() > log_s:
                    _log.info("%s: waiting until the server before this one has ended", self._name)
                    log_s = time.monotonic() + _LOG_SECONDS
            if is_ending():
                break
            message, descriptors = _received(link)
            if not message:  # the holder has ended
                link.close()
                deadline = time.monotonic() + HOLDER_SECONDS
                continue
            return self._accept(link, message, descriptors)
        return False

    @property
    def _name(self) -> str:
        return os.path.basename(self._folder)

    def _connect(self) -> socket.socket | None:
        """Connect to the holder. Returns None if it does not run, or starts.

        Raises:
            DeviceError: the system refuses.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        try:
            connect(link, self._folder, SERVER)
        except OSError as error:
            link.close()
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                return None
            raise DeviceError(f"{self._action}: {error}", error.errno or 0) from error
        return link

    def _accept(self, link: socket.socket, message: bytes, descriptors: list[int]) -> bool:
        answer = parse(message)
        if answer.get("error") == GONE:
            _log.info("%s: ending, since %s", self._name, answer.get("message"))
            return False
        check_answer(answer, self._action)
        if len(descriptors) != 2:
            close_all(descriptors)
            raise DeviceError(f"{self._action}: expected two descriptors, got {len(descriptors)}")
        self._link = link
        self.kernel, numbers = descriptors
        self.numbers = DatasetNumbers(numbers)
        self.init = bytes.fromhex(answer["init"])
        self.name, self.device = str(answer["name"]), str(answer["device"])
        return True

    def tell_init(self, init: bytes) -> None:
        """Have the holder keep the kernel's first request."""
        self.init = init
        self._tell({"op": "init", "init": init.hex()})

    def tell_answers(self) -> None:
        """Say that the mount answers."""
        self.answers = True
        self._tell({"op": "ready"})

    def _tell(self, words: dict[str, Any]) -> None:
        """Send a message. If the holder has ended, the next one is told when it gets the mount."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                send(self._link, words)

    def attend(self) -> None:
        """Notice the end of the holder, and give the mount back to the next one."""
        if self._link is None:
            self._give_back()
        elif select.select([self._link], [], [], 0)[0]:
            message, descriptors = _received(self._link)
            close_all(descriptors)
            answer = parse(message) if message else {}
            if "error" in answer:
                self._note_refusal(answer)
            elif not message:
                self._lose("the holder has ended")

    def _note_refusal(self, answer: dict[str, Any]) -> None:
        if answer["error"] == LockedError.__name__:
            self.refused = str(answer.get("message"))
        else:
            self._lose(str(answer.get("message")))

    def _lose(self, reason: str) -> None:
        if reason != self._last:
            self._last = reason
            _log.warning("%s: %s; serving on, and trying to give the mount back", self.name, reason)
        assert self._link is not None
        self._link.close()
        self._link = None

    def _give_back(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + RECONNECT_SECONDS
        with contextlib.suppress(DlfsError):  # tried again later
            self._link = self._connect()
        if self._link is None:
            return
        words = {"op": "serve", "device": self.device, "init": self.init.hex()}
        try:
            send(
                self._link,
                {**words, "answers": self.answers},
                [self.kernel, self.numbers.descriptor],
            )
        except OSError as error:
            self._lose(str(error))


def _received(link: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message. Returns nothing if the holder has ended."""
    try:
        return receive(link, MESSAGE_BYTES_MAX, 2)
    except OSError:
        return b"", []


class _LastError:
    """The error by which the last server has ended, in memory that the keeper shares with it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("dlfs-server-error")

    def clear(self) -> None:
        """Forget the error of the server before."""
        os.ftruncate(self._descriptor, 0)

    def set(self, error: DlfsError | OSError) -> None:
        """Record the error of this server."""
        kind = type(error) if isinstance(error, DlfsError) else DeviceError
        words = {"error": kind.__name__, "message": str(error), "code": getattr(error, "errno", 0)}
        self.clear()
        os.pwrite(self._descriptor, to_json(words), 0)

    def get(self) -> DlfsError | None:
        """Return the error of the last server; None if it has ended otherwise."""
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        if not text:
            return None
        words = parse_json(text)
        return restore_error(words["error"], words["message"], words["code"] or 0)


class HeldKeeper(Keeper):
    """The keeper of a mount that the holder has.

    Args:
        request: volumes and options.
        server: as of ``Keeper``; it leaves the mount when it ends.
        link: the connection to the holder, which has given the mount.
        last_error: the error of the last server.
    """

    _unmounts = False

    def __init__(
        self, request: MountRequest, server: Server, link: HolderLink, last_error: _LastError
    ) -> None:
        super().__init__(replace(request, directory=link.name), server, lambda: None)
        self._numbers.close()
        self._kernel, self._numbers, self._init = link.kernel, link.numbers, link.init
        self._link = link
        self._last_error = last_error

    def run(self, is_ending: Callable[[], bool] = lambda: False) -> None:
        """Keep servers running until the mount is unmounted, or SIGTERM comes.

        Args:
            is_ending: returns True if SIGTERM has come before this call.

        Raises:
            DeviceError: the servers fail; another process has the mount.
        """
        for number in SIGNALS:
            signal.signal(number, self._end)
        self._ending = self._ending or is_ending()
        self._find_init()
        self._answered = self._resumed  # by a server before: this one may take several attempts
        super().run()
        if self._link.refused is not None:
            raise DeviceError(f"serve the mount {self._path}: {self._link.refused}")

    def _find_init(self) -> None:
        """Find out whether the kernel's first request is answered. It may have got lost on its way.

        Raises:
            UsageError: a server that did not come from the holder has answered it.
        """
        try:
            init = unanswered_init(self._kernel)
        except OSError:  # it is unmounted, which shows later
            return
        if init is not None:
            self._init = init
            self._link.tell_init(init)
        elif not self._init:
            raise UsageError(
                f"serve the mount {self._path}: expected a new mount, got one whose first request "
                "another server has taken; unmount it, and mount it anew"
            )
        self._resumed = init is None

    def _before_server(self) -> None:
        self._find_init()

    def _note_answer(self) -> None:
        super()._note_answer()
        self._link.tell_answers()

    def _is_mounted(self) -> bool:
        return is_connected(self._kernel)

    def _attend_others(self) -> None:
        self._link.attend()
        if self._link.refused is not None and not self._ending:
            self._ending = True
            self._end_server()
        if not self._dying:  # they are awaited one by one
            self._reap()

    def _reap(self) -> None:
        """Await the processes that the system has given to the first process of a container."""
        with contextlib.suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (found := os.waitid(os.P_ALL, 0, options)) and found.si_pid != self._pid:
                os.waitpid(found.si_pid, 0)

    def _abandon(self, reason: str) -> None:
        raise DeviceError(reason)

    def _leave(self, end: str) -> None:
        if not self._ending:
            error = self._last_error.get()
            why = "its log says why" if error is None else str(error)
            raise restore_error(
                "DeviceError" if error is None else type(error).__name__,
                f"serve the mount {self._path}: the server {end}: {why}",
                getattr(error, "errno", None) or 0,
            )


def serve_held(
    volume_uris: Sequence[str],
    folder: str | os.PathLike[str],
    options: MountOptions,
    on_ready: OnReady,
) -> None:
    """Serve a mount that the holder has, until it is unmounted or SIGTERM comes.

    Args:
        volume_uris: URI or path of each volume, as for ``dlfs.open``; several only if nested.
        folder: the folder of the mount, which ``holder.deposit`` has returned.
        options: options of the mount; requests do not come over io_uring.
        on_ready: called with the name of the mount and the transport in a server's process, when
            the mount answers.

    Raises:
        NotFoundError: there is no such mount or no holder; there is no native server.
        UsageError: this user may not serve the mount, or the kernel is older than Linux 6.9.
        DeviceError: the servers fail, as the log says.
        DlfsError: the error of the first server, as of ``dlfs.mount.server.serve``.

    Threads: the main thread of a process without others, which receives signals.
    """
    options = replace(options, uring=False)
    if not can_keep(options):
        raise UsageError(
            "serve the mount of a holder: expected the native server and Linux 6.9 or newer"
        )
    ended: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda found, _: ended.append(found))
    link = HolderLink(folder)
    if not link.take(lambda: bool(ended)):
        return

    last_error = _LastError()

    def run_server(inherited: InheritedMount, tell_keeper: Callable[[], None]) -> None:
        def ready(name: str, transport: str) -> None:
            tell_keeper()
            on_ready(name, transport)

        last_error.clear()
        try:
            serve(volume_uris, inherited.path, options, ready, inherited)
        except (DlfsError, OSError) as error:
            _log.error("%s: %s", inherited.path, error)
            last_error.set(error)
            raise

    request = MountRequest(list(volume_uris), str(folder), options, None)
    HeldKeeper(request, run_server, link, last_error).run(lambda: bool(ended))
