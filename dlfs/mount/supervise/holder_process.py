"""The holder, which keeps descriptors of mounts: ``dlfs hold FOLDER``.

It has one thread, reads and answers no request of the kernel, and starts no process. A mount has
the descriptor of ``/dev/fuse``, the memory of its dataset numbers, the kernel's first request, and
one server at a time. ``holder`` has the messages.

A holder that starts again finds the names of its mounts in its folder, and gets the descriptors
back from the servers. Until then it gives a mount to no other server. What was left by an earlier
boot of the machine is removed.

The holder looks once a second which mounts are unmounted, rather than to wait for their
descriptors: the kernel would wake it for each request of each mount.

Peers are not trusted. Root and the holder's own user may deposit; only they, and the user that
the depositor named, may serve a mount. The numbers of mounts, of connections, of messages a second
and of descriptors are bounded, and nothing waits for a peer.

Threads: the main thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    LimitError,
    LockedError,
    UsageError,
    write_error,
)
from dlfs.mount.descriptors import close_all, is_connected, is_fuse, peer_of, receive
from dlfs.mount.supervise.holder import (
    CONTROL,
    GONE,
    LOCK,
    MESSAGE_BYTES_MAX,
    MOUNTS,
    NAME,
    NOTE_BYTES_MAX,
    SERVER,
    STATE,
    Held,
    bind,
    parse,
    send,
)

MOUNTS_MAX = 1000
"""Most mounts; fewer where the system permits few open files."""
LINKS_MAX = 4
"""Most connections to one mount: of its server, and of those that wait."""
CONTROL_LINKS_MAX = 16
"""Most connections to the control socket; others wait."""
SILENT_SECONDS = 5.0
"""Time after which a connection is closed whose peer has requested nothing, in seconds."""
LOOK_SECONDS = 1.0
"""Time between two looks for mounts that are unmounted, in seconds."""
MESSAGES_MAX = 32
"""Most messages of one connection between two looks; later ones wait."""
LINES_MAX = 32
"""Most lines of the log about one mount between two looks; later ones are left out."""

NEW_SOCKET = ".new.sock"
"""Name of a socket until it takes connections."""

_DESCRIPTORS_EACH = 3 + LINKS_MAX
"""Most open files of a mount."""
_DESCRIPTORS_OTHER = 24 + CONTROL_LINKS_MAX
_INIT_BYTES_MAX = 16 << 10
_NUMBERS_BYTES_MAX = 16 << 20
_PAGE_BYTES = 64 << 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Link:
    """A connection.

    Attributes:
        mount: the mount that its socket belongs to; None for the control socket.
        asked: the peer has requested something.
        since_s: time of its last request, or of the connection, in seconds.
        messages: number of messages since the last look.
    """

    def __init__(self, peer: socket.socket, mount: _Mount | None) -> None:
        self.socket = peer
        self.mount = mount
        self.pid, self.uid = peer_of(peer)
        self.asked = False
        self.since_s = time.monotonic()
        self.messages = 0


class _Mount:
    """A mount, whose descriptor the holder has or had.

    Attributes:
        kernel: descriptor of ``/dev/fuse``; -1 until a server gives it back.
        numbers: descriptor of the memory of dataset numbers; -1 likewise.
        init: the kernel's first request, as hexadecimal digits; empty until a server has read it.
        server: connection of the server that has the mount.
        links: all connections; those that wait, in their order.
    """

    def __init__(self, name: str, device: str, uid: int, note: str) -> None:
        self.name, self.device, self.uid, self.note = name, device, uid, note
        self.kernel = self.numbers = -1
        self.init = ""
        self.listener: socket.socket | None = None
        self.server: _Link | None = None
        self.answers = False
        self.links: list[_Link] = []
        self.lines = 0

    def log(self, text: str) -> None:
        """Write a line about this mount to the log."""
        self.lines += 1
        if self.lines <= LINES_MAX:
            _say(f"{self.name}: {text}")

    def admits(self, uid: int) -> bool:
        """Return True if processes of a user may serve this mount."""
        return uid == self.uid or _is_own(uid)

    def waiting(self) -> list[_Link]:
        """Return the connections of the servers that wait for this mount."""
        return [link for link in self.links if link.asked and link is not self.server]

    def describe(self) -> dict[str, Any]:
        """Return the fields of ``holder.Held``."""
        pid = None if self.server is None else self.server.pid
        present, waiting = self.kernel >= 0, len(self.waiting())
        held = Held(
            self.name, self.note, self.device, self.uid, present, pid, self.answers, waiting
        )
        return asdict(held)


class Holder:
    """The holder of a folder.

    Args:
        folder: the folder, which is made with the mode 0700 if it is not there.

    Raises:
        LockedError: another holder has the folder.
        DeviceError: the folder cannot be written.

    Threads: one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._poll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}  # what to call, by descriptor
        self._links: dict[int, _Link] = {}  # by descriptor
        self._mounts: dict[str, _Mount] = {}
        self._looked_s = time.monotonic()
        self._mounts_max = _room_for_mounts()
        try:
            self._lock = self._prepare()
            self._restore()
            self._control = self._listen(self._folder, CONTROL, None, 0o600)
        except OSError as error:
            if isinstance(error, DlfsError):
                raise
            raise DeviceError(
                f"hold mounts in {self._folder}: {error}", error.errno or 0
            ) from error
        _say(f"holding mounts in {self._folder}, at most {self._mounts_max}")

    def _prepare(self) -> int:
        """Make the folder, and lock it. Returns the descriptor of the lock."""
        os.makedirs(self._folder, mode=0o711, exist_ok=True)
        lock = os.open(self._path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockedError(
                f"hold mounts in {self._folder}: another holder does; end that one, or name "
                "another folder"
            ) from error
        os.makedirs(self._path(STATE), mode=0o700, exist_ok=True)
        os.makedirs(self._path(MOUNTS), mode=0o755, exist_ok=True)
        return lock

    def _path(self, *names: str) -> str:
        return os.path.join(self._folder, *names)

    # ---- what a holder before has left -----------------------------------------------------------

    def _restore(self) -> None:
        """Find the mounts that a holder before this one had."""
        boot = _boot()
        for left in Path(self._folder).glob(".new-*"):
            left.unlink()
        for name in sorted(os.listdir(self._path(STATE))):
            words = self._read_state(name)
            if words.get("boot") == boot and len(self._mounts) < self._mounts_max:
                mount = _Mount(name, words["device"], words["uid"], words["note"])
                self._show(mount)
                mount.log("waiting for its server, which has the mount")
            else:
                self._remove_files(name)
        for name in set(os.listdir(self._path(MOUNTS))) - set(self._mounts):
            self._remove_files(name)

    def _read_state(self, name: str) -> dict[str, Any]:
        """Return what is written about a mount; nothing if it is damaged."""
        with contextlib.suppress(OSError, UsageError, KeyError):
            if NAME.fullmatch(name):
                words = parse(Path(self._path(STATE, name)).read_bytes())
                _check_types(words, device=str, uid=int, note=str)
                return words
        return {}

    def _write_state(self, mount: _Mount) -> None:
        words = {"device": mount.device, "uid": mount.uid, "note": mount.note, "boot": _boot()}
        path = Path(self._path(STATE, mount.name))
        new = Path(self._path(f".new-{mount.name}"))
        try:
            new.write_text(json.dumps(words))
            new.rename(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def _remove_files(self, name: str) -> None:
        """Remove the files of a mount."""
        for path in ((MOUNTS, name, SERVER), (MOUNTS, name, NEW_SOCKET), (STATE, name)):
            with contextlib.suppress(OSError):
                os.unlink(self._path(*path))
        with contextlib.suppress(OSError):
            os.rmdir(self._path(MOUNTS, name))

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Keep mounts, until a signal ends the process."""
        while True:
            self.step(LOOK_SECONDS if self._mounts or self._links else -1)

    def step(self, seconds: float) -> None:
        """Handle what comes in time, and look for what has ended.

        Args:
            seconds: longest wait, in seconds; negative: no limit.
        """
        for descriptor, _ in self._poll.poll(seconds):
            call = self._ready.get(descriptor)
            if call is not None:  # not closed by an earlier event
                call()
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_SECONDS:
            self._looked_s = now_s
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        for mount in list(self._mounts.values()):
            mount.lines = 0
            if mount.kernel >= 0 and not is_connected(mount.kernel):
                self._forget(mount, "it was unmounted")
        for link in list(self._links.values()):
            if link.messages >= MESSAGES_MAX:
                self._poll.modify(link.socket, select.EPOLLIN)
            link.messages = 0
            silent = link.mount is None or not link.asked
            if silent and now_s - link.since_s > SILENT_SECONDS:
                self._close(link)

    def _watch(self, watched: socket.socket, call: Callable[[], None]) -> None:
        self._ready[watched.fileno()] = call
        self._poll.register(watched, select.EPOLLIN)

    def _unwatch(self, watched: socket.socket) -> None:
        del self._ready[watched.fileno()]
        self._poll.unregister(watched)
        watched.close()

    # ---- connections -----------------------------------------------------------------------------

    def _listen(self, folder: str, name: str, mount: _Mount | None, mode: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            bind(listener, folder, NEW_SOCKET)
            os.chmod(os.path.join(folder, NEW_SOCKET), mode)
            listener.listen(LINKS_MAX if mount is not None else CONTROL_LINKS_MAX)
            os.replace(os.path.join(folder, NEW_SOCKET), os.path.join(folder, name))
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._watch(listener, lambda: self._accept(listener, mount))
        return listener

    def _accept(self, listener: socket.socket, mount: _Mount | None) -> None:
        others = sum(each.mount is mount for each in self._links.values())
        if mount is None and others >= CONTROL_LINKS_MAX:
            self._poll.modify(listener, 0)  # root waits, until a connection ends
            return
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                time.sleep(0.01)  # the connection stays, and would be offered again at once
            return
        peer.setblocking(False)
        link = _Link(peer, mount)
        if not (_is_own(link.uid) if mount is None else mount.admits(link.uid)):
            allowed = "only root may" if mount is None else f"only root and user {mount.uid} may"
            refusal = _refusal(UsageError(f"{allowed}, got user {link.uid}"))
        elif mount is not None and others >= LINKS_MAX:
            refusal = _refusal(LimitError(f"expected at most {LINKS_MAX} connections"))
        else:
            self._links[peer.fileno()] = link
            if mount is not None:
                mount.links.append(link)
            self._watch(peer, lambda: self._receive(link))
            return
        with contextlib.suppress(OSError):
            send(peer, refusal)
        peer.close()

    def _close(self, link: _Link) -> None:
        """Close a connection, and give the mount that its peer had to the next server."""
        del self._links[link.socket.fileno()]
        self._unwatch(link.socket)
        mount = link.mount
        if mount is None:
            self._poll.modify(self._control, select.EPOLLIN)
            return
        mount.links.remove(link)
        if mount.server is link:
            mount.server, mount.answers = None, False
            mount.log("its server has ended")
            self._admit(mount)

    def _send(self, link: _Link, words: dict[str, Any], descriptors: tuple[int, ...] = ()) -> bool:
        """Send an answer. Returns False if the peer has ended or does not read."""
        try:
            send(link.socket, words, descriptors)
        except OSError:
            return False
        return True

    def _receive(self, link: _Link) -> None:
        # To close a file of a file system that does not answer, or to look at it, takes for ever:
        # so descriptors of servers are only received where they are needed.
        needed = link.mount is None or link.mount.kernel < 0
        try:
            message, descriptors = receive(link.socket, MESSAGE_BYTES_MAX + 1, 2 if needed else 0)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        if not message:
            close_all(descriptors)
            self._close(link)
            return
        link.messages += 1
        if link.messages == MESSAGES_MAX:
            self._poll.modify(link.socket, 0)  # until the next look; its end is noticed
        link.since_s = time.monotonic()
        taken: list[int] = []
        try:
            words = parse(message)
            answer = self._handle(link, words, descriptors, taken)
        except OSError as error:
            answer = _refusal(error if isinstance(error, DlfsError) else _failure(error))
        except DlfsError as error:
            answer = _refusal(error)
        close_all([each for each in descriptors if each not in taken])
        # The connection of a server stays open while the server lives, whatever it sends.
        is_server = link.mount is not None and link.mount.server is link
        if answer and not self._send(link, answer) and self._is_open(link) and not is_server:
            self._close(link)

    def _is_open(self, link: _Link) -> bool:
        return link.socket.fileno() >= 0

    def _handle(
        self, link: _Link, words: dict[str, Any], descriptors: list[int], taken: list[int]
    ) -> dict[str, Any]:
        """Handle a message.

        Args:
            link: the connection from which it came.
            words: its fields.
            descriptors: its descriptors.
            taken: gets those that this holder keeps.

        Returns:
            The answer; empty for none.

        Raises:
            DlfsError: the message is refused.
            OSError: the folder cannot be written.
        """
        operation = words.get("op")
        if link.mount is None:
            if operation == "deposit":
                return self._deposit(words, descriptors, taken)
            if operation == "drop":
                return self._drop(words)
            if operation == "list":
                return self._list(words)
        elif operation == "serve" and not link.asked:
            return self._serve(link, link.mount, words, descriptors, taken)
        elif operation in ("init", "ready") and link.mount.server is link:
            if operation == "init":
                link.mount.init = _checked_init(words)
            elif not link.mount.answers:
                link.mount.answers = True
                link.mount.log(f"answers, by the server {link.pid}")
            return {}
        raise UsageError(f"this socket takes no message {str(operation)[:40]!r} now")

    # ---- the node plugin -------------------------------------------------------------------------

    def _deposit(
        self, words: dict[str, Any], descriptors: list[int], taken: list[int]
    ) -> dict[str, Any]:
        _check_types(words, name=str, device=str, uid=int, note=str)
        new = _Mount(_checked_name(words), words["device"], words["uid"], words["note"])
        if len(new.note.encode(errors="replace")) > NOTE_BYTES_MAX:
            raise LimitError(f"expected a note of at most {NOTE_BYTES_MAX} bytes")
        if not new.device or len(new.device) > 32 or not 0 <= new.uid < 1 << 32:
            raise UsageError(f"expected a device and a user, got {new.device[:40]!r} and {new.uid}")
        kernel = _checked_kernel(descriptors)
        found = self._mounts.get(new.name)
        if found is not None and found.kernel >= 0 and not is_connected(found.kernel):
            self._forget(found, "it was unmounted")
            found = None
        if found is not None and found.kernel >= 0:
            if found.device != new.device:
                raise ExistsError(
                    f"another mount has this name, device {found.device}; unmount it, or drop it"
                )
            return {"folder": self._path(MOUNTS, new.name)}
        if found is None and len(self._mounts) >= self._mounts_max:
            raise LimitError(f"it holds {self._mounts_max} mounts, and no more")
        numbers = os.memfd_create("dlfs-dataset-numbers")
        try:
            self._write_state(new)
            if found is None:
                self._show(new)
        except BaseException:
            os.close(numbers)
            if found is None:
                self._remove_files(new.name)
            raise
        if found is not None:  # its server has not come back
            found.device, found.uid, found.note = new.device, new.uid, new.note
            new = found
            for link in [each for each in found.links if not found.admits(each.uid)]:
                self._close(link)
        new.kernel, new.numbers = kernel, numbers
        taken.append(kernel)
        new.log(f"deposited, device {new.device}, for user {new.uid}")
        self._admit(new)
        return {"folder": self._path(MOUNTS, new.name)}

    def _show(self, mount: _Mount) -> None:
        """Make the folder and the socket of a mount."""
        folder = self._path(MOUNTS, mount.name)
        os.makedirs(folder, mode=0o755, exist_ok=True)
        mount.listener = self._listen(folder, SERVER, mount, 0o666)
        self._mounts[mount.name] = mount

    def _drop(self, words: dict[str, Any]) -> dict[str, Any]:
        found = self._mounts.get(_checked_name(words))
        if found is not None:
            self._forget(found, "it was dropped")
        return {"dropped": found is not None}

    def _forget(self, mount: _Mount, reason: str) -> None:
        """Forget a mount that has ended."""
        mount.log(f"forgotten, since {reason}")
        del self._mounts[mount.name]
        if mount.listener is not None:
            self._unwatch(mount.listener)
        mount.server = None
        close_all([each for each in (mount.kernel, mount.numbers) if each >= 0])
        mount.kernel = mount.numbers = -1
        for link in list(mount.links):
            self._send(link, {"error": GONE, "message": reason})
            self._close(link)
        self._remove_files(mount.name)

    def _list(self, words: dict[str, Any]) -> dict[str, Any]:
        _check_types(words, after=str)
        page: list[dict[str, Any]] = []
        size = 0
        names = sorted(name for name in self._mounts if name > words["after"])
        for name in names:
            page.append(self._mounts[name].describe())
            size += len(json.dumps(page[-1]))
            if size > _PAGE_BYTES:
                break
        return {"mounts": page, "more": len(page) < len(names)}

    # ---- servers ---------------------------------------------------------------------------------

    def _serve(
        self,
        link: _Link,
        mount: _Mount,
        words: dict[str, Any],
        descriptors: list[int],
        taken: list[int],
    ) -> dict[str, Any]:
        """Have a server wait for its turn, or take back what it has."""
        if "device" in words:
            _check_types(words, device=str, answers=bool)
            init = _checked_init(words)
            self._take_back(mount, words["device"], descriptors, taken)
            link.asked = True
            mount.server, mount.answers, mount.init = link, words["answers"], init
            mount.log(f"given back by the server {link.pid}")
            return {"returned": True}
        link.asked = True
        self._admit(mount)
        return {}

    def _take_back(
        self, mount: _Mount, device: str, descriptors: list[int], taken: list[int]
    ) -> None:
        if mount.server is not None:
            raise LockedError(f"process {mount.server.pid} has the mount")
        if device != mount.device:
            raise UsageError(f"expected the mount of device {mount.device}, got {device[:40]!r}")
        if mount.kernel >= 0:
            return
        kernel = _checked_kernel(descriptors[:1])
        if len(descriptors) != 2 or not _is_memory(descriptors[1]):
            raise UsageError("expected the memory of dataset numbers")
        mount.kernel, mount.numbers = kernel, descriptors[1]
        taken += descriptors

    def _admit(self, mount: _Mount) -> None:
        """Give a mount that no server has to the first that waits for it."""
        while mount.server is None and mount.kernel >= 0 and (waiting := mount.waiting()):
            link = mount.server = waiting[0]
            mount.answers = False
            words = {"init": mount.init, "name": mount.name, "device": mount.device}
            if self._send(link, words, (mount.kernel, mount.numbers)):
                mount.log(f"given to the server {link.pid}")
            else:
                mount.server = None
                self._close(link)


# ---- checks --------------------------------------------------------------------------------------


def _check_types(words: dict[str, Any], **kinds: type) -> None:
    for name, kind in kinds.items():
        if type(words.get(name)) is not kind:
            raise UsageError(
                f"expected {name} of type {kind.__name__}, got {words.get(name)!r:.60}"
            )


def _checked_name(words: dict[str, Any]) -> str:
    _check_types(words, name=str)
    name = str(words["name"])
    if not NAME.fullmatch(name):
        raise UsageError(f"expected a name that matches {NAME.pattern}, got {name[:140]!r}")
    return name


def _checked_init(words: dict[str, Any]) -> str:
    _check_types(words, init=str)
    init = str(words["init"])
    try:
        size = len(bytes.fromhex(init))
    except ValueError:
        size = _INIT_BYTES_MAX + 1
    if size > _INIT_BYTES_MAX:
        raise UsageError(f"expected hexadecimal digits of at most {_INIT_BYTES_MAX} bytes")
    return init


def _checked_kernel(descriptors: list[int]) -> int:
    """Return the descriptor of a mount."""
    if len(descriptors) != 1 or not is_fuse(descriptors[0]):
        raise UsageError("expected a descriptor of /dev/fuse")
    if not is_connected(descriptors[0]):
        raise UsageError("expected a descriptor of /dev/fuse that is mounted, got one that is not")
    return descriptors[0]


def _is_own(uid: int) -> bool:
    """Return True if a user may do everything here."""
    return uid in (0, os.geteuid())


def _is_memory(descriptor: int) -> bool:
    """Return True if a descriptor may be the memory of dataset numbers."""
    found = os.fstat(descriptor)
    return stat.S_ISREG(found.st_mode) and found.st_size <= _NUMBERS_BYTES_MAX


def _refusal(error: DlfsError) -> dict[str, Any]:
    code = getattr(error, "errno", None) or 0
    return {"error": type(error).__name__, "message": str(error), "code": code}


def _failure(error: OSError) -> DlfsError:
    return write_error(str(error), error.errno or 0)


def _boot() -> str:
    return _BOOT.read_text().strip()


def _room_for_mounts() -> int:
    """Raise the limit of open files. Returns the number of mounts that it permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, min(MOUNTS_MAX, (hard - _DESCRIPTORS_OTHER) // _DESCRIPTORS_EACH))


def _say(text: str) -> None:
    """Write a line to the log."""
    with contextlib.suppress(OSError):
        os.write(2, f"dlfs hold: {text}\n".encode(errors="replace"))


def main() -> None:
    """Hold mounts in the folder that the command line names."""
    os.umask(0o022)  # others enter the folders of their mounts
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process of a container needs them
        signal.signal(number, lambda *_: os._exit(0))
    try:
        Holder(sys.argv[1]).run()
    except DlfsError as error:
        _say(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
