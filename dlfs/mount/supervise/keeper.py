"""Keeps a mount alive when its server dies: holds ``/dev/fuse``, and starts the next server.

The keeper mounts the file system and holds its descriptor, so the kernel does not notice that a
server dies: programs wait until the next one answers. The keeper serves nothing itself; it waits
for its child. The head of ``dlfs.mount.supervise`` has the states of a mount.

A server is a fork of the keeper, which has loaded all modules and started no threads, so the next
one answers within a fraction of a second. Over a pair of sockets, the server says that the volume
is open, and then that the mount answers; the keeper mounts in between.

A mount moves when a directory above its mount point is renamed, and another one may then take the
old path. The keeper therefore finds its mount by number before it starts a server, passes the mount
on or detaches it. A server knows only the path at its own start. One that ends after the mount has
moved leaves it mounted, and the keeper detaches it.

Servers fail one after the other while a device of the volume is away, or when a request that is
sent again kills each of them. The keeper pauses between them, while programs wait, and gives the
mount up after a minute.

The last thread of a server that was killed may wait for a disk that hangs, and a crash may write
gigabytes of memory to a file. So the keeper does not wait for the end of a server whose first
thread is dead, or whose memory is being dumped. A thread of it may still have taken a request; when
it has ended, the keeper has the kernel send requests again once more.

Needs the native server and Linux 6.9 (FUSE_NOTIFYRESEND). A mount over io_uring has no keeper: the
kernel's queues end with the server, and requests would wait without end.

Source: Linux, include/uapi/linux/fuse.h and fs/fuse/dev.c; proc_pid_status(5).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import platform
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dlfs._native.fuse import KernelConnection
from dlfs._native.processes import die_with_parent
from dlfs.errors import DeviceError, DlfsError, UsageError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.descriptors import (
    INIT_BYTES_MAX,
    is_connected,
    is_fuse,
    is_init,
    receive,
    send_again,
)
from dlfs.mount.options import MountOptions
from dlfs.mount.server import choose_server
from dlfs.mount.supervise.background import MountRequest
from dlfs.mount.supervise.inherited import DatasetNumbers, InheritedMount
from dlfs.mount.supervise.processes import is_dying
from dlfs.mount.supervise.replacement import (
    PROTOCOL,
    MountState,
    Predecessor,
    ReplacementPort,
    dlfs_version,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a mount. The keeper passes them to the server."""

KERNEL_MIN = (6, 9)
"""The first Linux that sends requests again."""

INIT_SECONDS = 2
"""Longest wait for the kernel's first request on a mount that a caller has made, in seconds."""

ENABLE_URING = Path("/sys/module/fuse/parameters/enable_uring")
"""The kernel's parameter that offers io_uring to mounts, read when a mount is made."""

YOUNG_SECONDS = 10.0
"""A server that has answered for less than this time when it dies has failed, in seconds."""

FAILING_SECONDS_MAX = 60.0
"""Time from the first of several failures in a row until the mount is given up, in seconds."""

PAUSE_SECONDS_MIN = 0.1
"""Pause after the second of several failures in a row, in seconds; each is twice the last one."""
PAUSE_SECONDS_MAX = 5.0
"""Longest pause between two servers, in seconds."""

_STEP_SECONDS = 0.1
"""Longest sleep within a pause, after which a signal ends it, in seconds."""

TAKEOVER_SECONDS = 8.0
"""Longest time for a new keeper's server to answer once the one before is dead, in seconds; less
than ``replacement.PASS_SECONDS``."""

_LOOK_SECONDS = 0.25
"""Time between two looks at a server, which may be dying, in seconds."""

_END_LOOK_SECONDS = 0.002
"""Time between two looks at a server that was killed to be replaced, in seconds."""

_DYING_SECONDS = 0.1
"""Time after which the keeper does not wait for the last thread of a server, in seconds."""

_OPENED, _READY = b"o", b"r"
"""Messages of a server to its keeper: the volume is open; the mount answers."""

_log = logging.getLogger(__name__)

Server = Callable[[InheritedMount, Callable[[], None]], None]
"""Opens a volume, connects to the mount, and calls the second argument when it answers."""


def can_keep(options: MountOptions) -> bool:
    """Return True if a mount with these options can be kept on this machine.

    False where the kernel offers io_uring and the options do not refuse it.

    Raises:
        DlfsError: as ``choose_server``.
    """
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (
        found is not None
        and (int(found[1]), int(found[2])) >= KERNEL_MIN
        and choose_server(options) == "native"
        and not (options.uring and _is_uring_offered())
    )


def _is_uring_offered() -> bool:
    try:
        return ENABLE_URING.read_text().strip() == "Y"
    except OSError:  # an older kernel
        return False


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def check_given(kernel: int, path: str) -> None:
    """Check that a descriptor that a caller gave is of a mount that nobody has answered yet.

    Raises:
        UsageError: it is not.
    """
    action = f"mount on {path}: expected --fuse-fd to be a descriptor of /dev/fuse"
    try:
        known = is_fuse(kernel)
    except OSError as error:
        raise UsageError(f"{action}, got {kernel}, which is not open") from error
    if not known:
        raise UsageError(f"{action}, got {os.readlink(f'/proc/self/fd/{kernel}')}")
    poll = select.poll()
    poll.register(kernel, select.POLLIN)
    found = poll.poll(INIT_SECONDS * 1000)
    if not found or found[0][1] & select.POLLERR:
        raise UsageError(f"{action} with a new mount, got one that is not mounted or was in use")


class Failures:
    """Servers that fail one after the other, and the pauses between them.

    Attributes:
        count: number of servers that died since the last one that had answered for long.
    """

    def __init__(self) -> None:
        self.count = 0
        self._since_s = 0.0

    def pause_after(self, lived_s: float, died_s: float) -> float | None:
        """Count a server that died. Returns the pause before the next one; None to give up.

        Args:
            lived_s: time for which the server has answered, in seconds.
            died_s: time of its death, in seconds.
        """
        self.count = 1 if lived_s >= YOUNG_SECONDS else self.count + 1
        if self.count == 1:
            self._since_s = died_s
            return 0.0
        if died_s - self._since_s > FAILING_SECONDS_MAX:
            return None
        return float(min(PAUSE_SECONDS_MIN * 2 ** (self.count - 2), PAUSE_SECONDS_MAX))


class Keeper:
    """The keeper of one mount.

    Args:
        request: volume, mount point (as ``mountpoint.prepare`` returned it) and options.
        server: runs in a process of its own until the mount is gone, and unmounts when it gets
            SIGTERM. It reports its errors itself, and raises them.
        on_mounted: called when the file system is mounted or taken over, and no message follows
            any more.
        predecessor: the keeper that has mounted the file system, if it is to be replaced.

    Threads: the main thread of a process without others, which leads its process group.
    """

    _unmounts = True
    """A server that gets SIGTERM unmounts. False: the mount is another process's."""

    def __init__(
        self,
        request: MountRequest,
        server: Server,
        on_mounted: Callable[[], None],
        predecessor: Predecessor | None = None,
    ) -> None:
        self._request = request
        self._path = request.directory
        self._server = server
        self._on_mounted = on_mounted
        self._predecessor = predecessor
        if predecessor is None:
            self._kernel = -1
            self._init = b""
            self._numbers = DatasetNumbers()
            self._record: mountpoints.MountRecord | None = None
            self._port = ReplacementPort()
        else:
            self._kernel = predecessor.kernel
            self._init = bytes.fromhex(predecessor.state.init)
            self._numbers = predecessor.numbers
            self._record = predecessor.record
            self._port = ReplacementPort(predecessor.listener)
        self._resumed = self._kernel >= 0  # a server has answered the kernel's first request
        self._keeper = os.getpid()
        self._pid = 0
        self._dying: list[int] = []  # descriptors of earlier servers that had not ended yet
        self._answered = False  # a server on this mount, so another one can take it over
        self._ending = False

    def run(self) -> None:
        """Keep the mount alive until it is unmounted, replaced, or ended by SIGTERM.

        Mounts it, unless a predecessor has.

        Raises:
            DeviceError: the system refused the mount, or the predecessor goes on.
        """
        gc.freeze()  # the servers share the memory of what is loaded
        for number in SIGNALS:
            signal.signal(number, self._end)
        failures = Failures()
        while True:
            if self._port.stop_wanted and self._pass_on():
                return
            lived_s, status, end = self._run_server()
            if self._predecessor is not None:
                self._give_up(self._predecessor, end)
            if self._kernel < 0 or not self._is_mounted():
                return
            if self._port.stop_wanted:
                continue
            if self._ending or not self._answered or (status == 0 and self._unmounts):
                break
            pause_s = failures.pause_after(lived_s, time.monotonic())
            died = f"{self._path}: the server {end}"
            if pause_s is None:
                self._abandon(f"{died}; given up after {failures.count} servers in a row")
                return
            _log.error("%s; starting another in %.1f s", died, pause_s)
            if not self._pause(pause_s):
                break
            if not self._is_mounted():
                return
        if self._is_mounted():  # looked up again, since the pause may have been long
            self._leave(end)

    def _abandon(self, reason: str) -> None:
        """Give a mount up whose servers fail."""
        _log.error("%s", reason)

    def _leave(self, end: str) -> None:
        """End a mount, as its server has ended and there will be no other."""
        _log.error("%s: unmounting, since the server %s", self._path, end)
        mountpoints.detach(self._path)

    def _give_up(self, predecessor: Predecessor, end: str) -> NoReturn:
        """Leave the mount to the predecessor, since the server has ended.

        Raises:
            DeviceError: always.
        """
        reason = f"the new server {end} before it answered; the present one goes on"
        if predecessor.is_dropped():
            reason = predecessor.why_dropped()
        predecessor.give_up()
        self._bury_all()
        raise DeviceError(f"replace the server of {self._path}: {reason}")

    def _pass_on(self) -> bool:
        """Let the new keeper have the mount. Returns True if it does, or if the mount is gone."""
        passed = self._port.pass_on(lambda: self._ending)
        if passed:
            self._bury_all()
        done = passed or not self._is_mounted()
        if not done:
            _log.error("%s: the new keeper has failed; starting another server", self._path)
        return done

    def _is_mounted(self) -> bool:
        """Return True if the file system is mounted, and note where it is now."""
        if self._record is None or not is_connected(self._kernel):
            return False
        found = mountpoints.find_again(self._record)
        if found is None:
            return False
        path = os.fsdecode(found.mountpoint)
        if path != self._path:
            _log.info("%s: a directory was renamed, the mount is on %s", self._path, path)
            self._path = path
            self._request = replace(self._request, directory=path)
        return True

    def _pause(self, seconds: float) -> bool:
        """Wait until the time has passed, or SIGTERM comes. Returns False in the second case.

        A new keeper ends the pause.
        """
        until_s = time.monotonic() + seconds
        while not self._ending and not self._port.stop_wanted:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            self._attend(min(left_s, _STEP_SECONDS))  # signals do not end it early
        return not self._ending

    def _start_server(self) -> socket.socket:
        """Start a server. Returns the socket on which it says how far it is."""
        self._before_server()
        here, there = socket.socketpair()
        with there:
            here.settimeout(_LOOK_SECONDS)
            with _signals_blocked():  # in the child, a handler of the keeper would signal the group
                self._pid = os.fork()
                if self._pid == 0:
                    here.close()
                    self._port.close()
                    self._serve(there)
        return here

    def _before_server(self) -> None:
        """Prepare the start of a server. An OSError counts as one that cannot be started."""

    def _run_server(self) -> tuple[float, int | None, str]:
        """Start a server and wait for its end.

        Returns:
            The time for which the mount has answered, in seconds, 0 if it never did; the exit
            status, None if no server could be started; how the server ended, for a message.
        """
        try:
            here = self._start_server()
        except OSError as error:  # memory or processes are short, which may pass
            if self._kernel < 0 or self._predecessor is not None:
                raise
            return 0.0, None, f"cannot be started ({error.strerror})"
        if self._ending:  # since the last look at it
            self._end_server()
        answers_s: float | None = None  # since when
        try:
            with here:
                if self._receive(here) == _OPENED:
                    if self._kernel < 0:
                        self._mount()
                    if self._predecessor is None:
                        self._send_connection(here)
                        ready = self._receive(here) == _READY
                    else:
                        ready = self._take_over(here, self._predecessor)
                    if ready:
                        answers_s = time.monotonic()
                        self._note_answer()
        except BaseException:
            os.kill(self._pid, signal.SIGKILL)
            raise
        finally:
            status = self._await_end()
            self._pid = 0
        lived_s = 0.0 if answers_s is None else time.monotonic() - answers_s
        return lived_s, status, f"{'died' if status else 'ended'} (status {status})"

    def _take_over(self, link: socket.socket, predecessor: Predecessor) -> bool:
        """Have the server answer in place of the predecessor's. Returns True if it does."""
        predecessor.stop()
        self._send_connection(link)
        if self._receive(link, TAKEOVER_SECONDS) != _READY:
            os.kill(self._pid, signal.SIGKILL)
            return False
        self._predecessor = None
        self._port.take_over()
        predecessor.finish()
        self._on_mounted()
        return True

    def _receive(self, link: socket.socket, seconds: float = math.inf) -> bytes:
        """Wait for what a server says.

        Returns:
            Nothing if the server has died, says nothing in time, or is to be replaced.
        """
        deadline = time.monotonic() + seconds
        while not self._attend(_LOOK_SECONDS, link.fileno()):
            late = time.monotonic() > deadline
            if late or is_dying(self._pid) or self._port.stop_wanted or self._is_dropped():
                return b""
        try:
            return link.recv(1)
        except ConnectionError:
            return b""

    def _note_answer(self) -> None:
        """Note that a server answers."""
        self._answered = self._resumed = True

    def _is_dropped(self) -> bool:
        """Return True if the predecessor does not pass the mount on to this keeper any more."""
        return self._predecessor is not None and self._predecessor.is_dropped()

    def _await_end(self) -> int:
        """Wait until the server has ended, or is dead but for a thread or the dump of its memory.

        Returns:
            The exit status, negative if a signal ended the server.
        """
        process = os.pidfd_open(self._pid)
        killed = False
        dying_s: float | None = None  # since when
        while not self._attend(_END_LOOK_SECONDS if killed or dying_s else _LOOK_SECONDS, process):
            if not killed and (self._port.stop_wanted or self._is_dropped()):
                os.kill(self._pid, signal.SIGKILL)
                killed = True
            now_s = time.monotonic()
            dying_s = (dying_s or now_s) if is_dying(self._pid) else None
            if dying_s is not None and now_s - dying_s > _DYING_SECONDS:
                self._dying.append(process)
                return -signal.SIGKILL
        os.close(process)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _attend(self, seconds: float, descriptor: int | None = None) -> bool:
        """Attend to a new keeper, its message, or the end of earlier servers, if one comes in time.

        Args:
            seconds: longest wait, in seconds.
            descriptor: ends the wait when it is ready: that of a process or of a connection.

        Returns:
            True if the descriptor is ready.
        """
        waits: list[Any] = [] if descriptor is None else [descriptor]
        port: list[Any] = []
        if self._answered and self._record is not None:
            self._port.open(self._record.device)
            port += self._port.sockets()
        found = select.select([*waits, *port, *self._dying], [], [], seconds)[0]
        if port:
            self._port.attend(self._state, self._kernel, self._numbers)
        self._attend_others()
        self._bury([each for each in self._dying if each in found])
        return descriptor in found

    def _attend_others(self) -> None:
        """Attend to others than servers and keepers, several times a second."""

    def _bury(self, ended: list[int]) -> None:
        """Have requests sent again that earlier servers, which have ended now, have taken."""
        for process in ended:
            os.waitid(os.P_PIDFD, process, os.WEXITED)
            os.close(process)
            self._dying.remove(process)
            send_again(self._kernel)

    def _bury_all(self) -> None:
        """Wait for the end of earlier servers, whose requests are sent again then."""
        while self._dying:
            self._bury(select.select(self._dying, [], [])[0])

    def _state(self) -> MountState:
        self._is_mounted()  # notes where
        return MountState(PROTOCOL, dlfs_version(), self._request, self._init.hex())

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        """Pass a signal to the server, which unmounts, or leave the mount to the predecessor."""
        self._ending = True
        self._end_server()

    def _end_server(self) -> None:
        if self._pid:  # otherwise none runs, or it is a child that is about to begin
            unmounts = self._unmounts and self._predecessor is None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM if unmounts else signal.SIGKILL)

    # ---- mounting --------------------------------------------------------------------------------

    def _mount(self) -> None:
        """Mount the file system, unless the caller has, and read the kernel's first request.

        Raises:
            UsageError: what the caller gave is no new mount.
            DeviceError: the system refused the mount.
        """
        given = self._request.fuse_fd
        if given is None:
            options = self._request.options.for_kernel()
            self._kernel = mountpoints.mount_file_system(self._path, options)
        else:
            check_given(given, self._path)
            self._kernel = given
            os.set_inheritable(given, False)
            os.set_blocking(given, True)
            self._request = replace(self._request, fuse_fd=None)
        self._record = mountpoints.record_of(self._path)
        if self._record is not None:
            self._port.open(self._record.device)
        self._init = os.read(self._kernel, INIT_BYTES_MAX)
        if not is_init(self._init):
            send_again(self._kernel)  # another server may answer what was taken
            raise UsageError(
                f"mount on {self._path}: expected --fuse-fd to be of a new mount, got one that a "
                "server has answered; unmount it, and mount it anew"
            )
        self._on_mounted()

    def _send_connection(self, link: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # the server has died: its end tells
            socket.send_fds(link, [bytes([self._resumed]) + self._init], [self._kernel])

    # ---- in the server's process -----------------------------------------------------------------

    def _serve(self, link: socket.socket) -> None:
        """Run the server and end the process."""
        code = 1
        try:
            if not self._unmounts:
                die_with_parent(self._keeper)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            inherited = InheritedMount(
                self._path,
                self._record,
                lambda: self._connect(link),
                self._numbers,
                resumed=self._resumed,
                replaces=self._predecessor is not None,
                is_visible=self._unmounts,
            )
            self._server(inherited, lambda: link.sendall(_READY))
            code = 0
        except (DlfsError, OSError):
            pass  # reported by the server
        except BaseException:  # noqa: BLE001
            _log.exception("%s: the server ends", self._path)
        finally:
            logging.shutdown()
            os._exit(code)

    def _connect(self, link: socket.socket) -> KernelConnection:
        """Tell the keeper that the server is prepared, and receive the connection to the kernel."""
        message = b""
        descriptors: list[int] = []
        with contextlib.suppress(ConnectionError):
            link.sendall(_OPENED)
            message, descriptors = receive(link, INIT_BYTES_MAX, 1)
        if not descriptors:
            raise DeviceError(f"mount on {self._path}: the keeper has ended")
        resumed = bool(message[0])
        return KernelConnection(descriptors[0], message[1:], keeper=True, resumed=resumed)
