"""Gives mounts to the holder, a process that keeps their descriptors and does nothing else.

A node plugin in a privileged container mounts a file system and deposits the descriptor of
``/dev/fuse`` with the holder under a name. A server in another container, without any capability,
takes it (``held``). The mount goes on when the plugin ends, and when the server does: the holder
gives the descriptor to the next one. ``holder_process`` is the holder, ``dlfs hold FOLDER``.

The holder's folder has these files::

    control.sock               deposit, drop, list: for root and the holder's user
    mounts/NAME/server.sock    servers of the mount NAME: for the user that its depositor named
    state/NAME                 who may serve the mount NAME, and the note: for the next holder
    lock                       one holder at a time

A container of a server gets the folder ``mounts/NAME`` and no other, so that it reaches no mount
but its own. The folder stays the same while the mount exists, also when the holder is killed and
started again; the sockets do not.

A message is an object in JSON with the field ``op``, and has at most ``MESSAGE_BYTES_MAX`` bytes::

    op        sender   fields, [descriptors]                       answer
    deposit   plugin   name, device, uid, note [/dev/fuse]         folder; or error
    drop      plugin   name                                        dropped; or error
    list      plugin   after: the last name of the page before     mounts, more; or error
    serve     server                                               init, name, device
                                                                   [/dev/fuse, numbers]; or error
    serve     server   init, device, answers [/dev/fuse, numbers]  returned; or error
    init      server   init: the request FUSE_INIT, as hex digits
    ready     server

A server that sends ``serve`` without descriptors waits for its turn. One that has the mount sends
it with them, after the holder was killed and started again. While it has the mount, it keeps the
connection open, and so do all processes that have the descriptor: its end shows that they all have
ended. The holder receives descriptors from a server only if it has none of the mount. An error has
the name of a class of ``dlfs.errors``, or ``gone``, and a message.

Holders and servers of different versions talk to each other, so messages stay, and fields are only
added.

Source: unix(7), SOCK_SEQPACKET.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlfs.errors import DeviceError, LimitError, NotFoundError, UsageError, restore_error
from dlfs.mount.descriptors import close_all, receive

CONTROL = "control.sock"
SERVER = "server.sock"
MOUNTS = "mounts"
STATE = "state"
LOCK = "lock"

MESSAGE_BYTES_MAX = 160 << 10
"""Longest message, in bytes; less than the buffer of a socket."""
NOTE_BYTES_MAX = 4096
"""Longest note, in bytes of UTF-8."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of mounts."""
GONE = "gone"
"""Error of a mount that was unmounted or dropped."""

_ANSWER_SECONDS = 10.0
"""Longest wait for an answer of the holder, in seconds."""
_RETRY_SECONDS = 0.01
_PATH_BYTES_MAX = 107
"""Longest path in the address of a socket, in bytes."""


@dataclass(frozen=True)
class Held:
    """A mount that the holder knows.

    Attributes:
        name: the name under which it was deposited.
        note: text of its depositor.
        device: device number of its file system as MAJOR:MINOR, from its depositor.
        uid: user whose processes may serve it.
        present: the holder has its descriptor. False after the holder was started again, until the
            server has given it back; if there is no server, the mount is dead.
        server_pid: process ID of the server that has the mount; None if there is none, and 0 if the
            process is in a namespace of process IDs that the holder does not see.
        answers: that server has said that the mount answers. It starts its processes again.
        waiting: number of servers that wait for the mount.
    """

    name: str
    note: str
    device: str
    uid: int
    present: bool
    server_pid: int | None
    answers: bool
    waiting: int


def deposit(
    folder: str | os.PathLike[str],
    name: str,
    kernel: int,
    *,
    device: str,
    uid: int,
    note: str = "",
) -> str:
    """Give a mount to the holder, which keeps it until it is unmounted or dropped.

    The caller then closes its own descriptor: a copy of it would keep a mount waiting that has no
    server and no holder. If the holder has this mount under this name already, nothing changes.

    Args:
        folder: the holder's folder.
        name: name of the mount: letters, digits, ``.``, ``_`` and ``-``, at most 128.
        kernel: descriptor of ``/dev/fuse``, as ``mountpoint.mount_file_system`` returns it. The
            kernel's first request must not have been read.
        device: device number of the mount as MAJOR:MINOR, as ``mountpoint.device_of`` returns it.
        uid: user whose processes may serve the mount, besides root.
        note: text for ``list_held``, at most 4096 bytes; no secret, since it is written to a file.

    Returns:
        The folder through which a server takes the mount: for ``dlfs mount --holder``.

    Raises:
        ExistsError: the holder has another mount of this name.
        LimitError: the holder has as many mounts as it may.
        UsageError: an argument is wrong; the descriptor is not of a mount; this user may not.
        NotFoundError: there is no holder.
        DeviceError: the holder does not answer; it cannot write its folder.
    """
    words = {"op": "deposit", "name": name, "device": device, "uid": uid, "note": note}
    with _Talk(folder, f"deposit the mount {name!r}") as talk:
        return str(talk.ask(words, [kernel])["folder"])


def drop(folder: str | os.PathLike[str], name: str) -> bool:
    """Have the holder forget a mount, whose servers end if it is unmounted.

    The mount itself stays, if it is mounted and a server has it.

    Args:
        folder: the holder's folder.
        name: name of the mount.

    Returns:
        True if the holder knew a mount of this name.

    Raises:
        UsageError: the name is wrong; this user may not.
        NotFoundError: there is no holder.
        DeviceError: the holder does not answer.
    """
    with _Talk(folder, f"drop the mount {name!r}") as talk:
        return bool(talk.ask({"op": "drop", "name": name})["dropped"])


def list_held(folder: str | os.PathLike[str]) -> list[Held]:
    """Return the mounts that the holder knows, by their names.

    Args:
        folder: the holder's folder.

    Raises:
        UsageError: this user may not.
        NotFoundError: there is no holder.
        DeviceError: the holder does not answer.
    """
    found: list[Held] = []
    more = True
    with _Talk(folder, "list the mounts") as talk:
        while more:
            page = talk.ask({"op": "list", "after": found[-1].name if found else ""})
            found += [
                Held(**{key: each[key] for key in _FIELDS if key in each})
                for each in page["mounts"]
            ]
            more = bool(page["more"])
    return found


_FIELDS = tuple(Held.__dataclass_fields__)


class _Talk:
    """A connection to the holder's control socket.

    Args:
        folder: the holder's folder.
        action: what is to be done, for messages.

    Raises:
        NotFoundError: there is no holder.
        DeviceError: the holder does not take connections.
    """

    def __init__(self, folder: str | os.PathLike[str], action: str) -> None:
        self._where = os.fspath(folder)
        self._action = f"{action} at the holder in {self._where}"
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(_ANSWER_SECONDS)
        try:
            self._connect()
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            self._link.close()
            raise NotFoundError(
                f"{self._action}: none runs there; 'dlfs hold {self._where}' is one"
            ) from error
        except OSError as error:
            self._link.close()
            raise self._failure(error) from error

    def _connect(self) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                connect(self._link, self._where, CONTROL)
            except BlockingIOError:  # many others connect; the system does not wait
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                return

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def _failure(self, error: OSError) -> DeviceError:
        late = isinstance(error, TimeoutError | BlockingIOError)
        reason = f"no answer within {_ANSWER_SECONDS:g} s" if late else str(error)
        return DeviceError(f"{self._action}: {reason}", error.errno or 0)

    def ask(self, words: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            DlfsError: the holder refuses, has ended, or does not answer.
        """
        try:
            with contextlib.suppress(BrokenPipeError):  # it has refused, and says why
                send(self._link, words, descriptors)
            message, _ = receive(self._link, MESSAGE_BYTES_MAX, 0)
        except OSError as error:
            raise self._failure(error) from error
        if not message:
            raise DeviceError(f"{self._action}: the holder has ended")
        answer = parse(message)
        check_answer(answer, self._action)
        return answer


# ---- messages ------------------------------------------------------------------------------------


def send(link: socket.socket, words: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with descriptors.

    Raises:
        LimitError: the message is too long.
        OSError: the connection failed.
    """
    message = json.dumps(words).encode()
    if len(message) > MESSAGE_BYTES_MAX:
        raise LimitError(
            f"talk to a holder: expected messages of at most {MESSAGE_BYTES_MAX} bytes, "
            f"got {len(message)}"
        )
    if descriptors:
        socket.send_fds(link, [message], descriptors)
    else:
        link.sendall(message)


def parse(message: bytes) -> dict[str, Any]:
    """Return the fields of a message.

    Raises:
        UsageError: it is not a JSON object.
    """
    try:
        words = json.loads(message)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, dict):
        raise UsageError(f"talk to a holder: expected a JSON object, got {message[:80]!r}")
    return words


def check_answer(answer: dict[str, Any], action: str) -> None:
    """Raise the error that an answer of the holder has, if it has one.

    Raises:
        DlfsError: the holder refuses.
    """
    if "error" in answer:
        code = answer.get("code", 0)
        raise restore_error(
            str(answer["error"]),
            f"{action}: {answer.get('message', '')}",
            code if isinstance(code, int) else 0,
            otherwise=UsageError,
        )


def connect(link: socket.socket, folder: str, name: str) -> None:
    """Connect to a socket in a folder, whose path may be longer than the address of a socket.

    Raises:
        OSError: the connection is refused.
    """
    with _short(folder, name) as path:
        link.connect(path)


def bind(link: socket.socket, folder: str, name: str) -> None:
    """Bind a socket in a folder, in place of one that an earlier process has left.

    Raises:
        OSError: the folder cannot be written.
    """
    with _short(folder, name) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        link.bind(path)


@contextlib.contextmanager
def _short(folder: str, name: str) -> Any:
    """Yield a path of a file in a folder that fits into the address of a socket."""
    path = os.path.join(folder, name)
    opened: list[int] = []
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        opened.append(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        path = f"/proc/self/fd/{opened[0]}/{name}"
    try:
        yield path
    finally:
        close_all(opened)
