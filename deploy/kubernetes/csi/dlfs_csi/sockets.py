"""Volumes of the sample API: published sockets of the node service, shown in pods.

For a volume with the attribute ``access: service``, the node service publishes a socket of a name
that follows from the target path, and the driver mounts the socket's directory at the target,
read-only. The service attaches the volume with the first socket for it, and detaches it with the
last; one that is started again listens at the same sockets by its own records.

The service's directory has its control socket and a directory ``sockets``. Service and driver may
see it at different paths, so its place follows from the driver's path of the control socket. The
service's user owns it, and has fewer rights than the driver: links in it are not followed.

Threads: any; one at a time for a name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dlfs._native.mounting import (
    BIND,
    NO_DEVICES,
    NO_PROGRAMS,
    NO_SET_USER_ID,
    READ_ONLY,
    REMOUNT,
    mount,
)
from dlfs.errors import (
    AuthenticationError,
    DlfsError,
    LimitError,
    NotFoundError,
    UsageError,
)
from dlfs.service.client import get_statistics, publish, unpublish
from dlfs.service.published import NEW_SOCKET_NAME, SOCKET_NAME
from dlfs_csi.context import EPHEMERAL, MountSpec, invalid
from dlfs_csi.failures import CallError, Code, code_of
from dlfs_csi.keys import missing_keys
from dlfs_csi.mounts import SOCKET_PREFIX, Answer, State

SERVICE_SECONDS = 10.0
"""Longest wait for a service, and for any message from it, in seconds."""
STATISTICS_SECONDS = 5.0
"""Longest wait for the answer of a service that is asked for the state of a volume, in seconds."""

_SOCKETS = "sockets"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEYS = "keys of the node service are in its own Secret, dlfs-service-keys"


class ServiceSockets:
    """The sockets that the node service publishes for this driver, by the names of mounts.

    Args:
        control: path of the service's control socket; empty: this node has no service.
    """

    def __init__(self, control: str) -> None:
        self._control = control
        self._folder = Path(control).parent

    def check(
        self, spec: MountSpec, context: Mapping[str, str], secrets: Mapping[str, str]
    ) -> None:
        """Check that the service may read a volume for a pod.

        An author of a pod could have it read any volume of which it has the keys: so URIs with keys
        are left to a PersistentVolume, which an administrator makes.

        Raises:
            CallError: INVALID_ARGUMENT; FAILED_PRECONDITION: this node has no service.
        """
        if secrets:
            raise invalid(f"secrets: expected none with access: service; {_KEYS}")
        keys = missing_keys(spec.volumes, {})
        if keys and context.get(EPHEMERAL) == "true":
            raise invalid(
                f"attribute 'volumes': expected URIs without keys in an inline volume with access: "
                f"service, got key {keys}; {_KEYS}, and only a PersistentVolume may name them"
            )
        self._check_service()

    def _check_service(self) -> None:
        if not self._control:
            raise CallError(
                Code.FAILED_PRECONDITION,
                "access: service: expected a driver with --service PATH, the control socket of the "
                "node service",
            )

    def publish(self, name: str, spec: MountSpec, note: str) -> None:
        """Have the service listen at a socket, unless it does already.

        Raises:
            CallError: it cannot; it has attached nothing.
        """
        try:
            publish(
                f"unix:{self._control}",
                SOCKET_PREFIX + name,
                attach=spec.volumes,
                cache_bytes=spec.memory_bytes or None,
                note=note,
                timeout_s=SERVICE_SECONDS,
            )
        except AuthenticationError as error:
            raise CallError(Code.UNAUTHENTICATED, f"{error}; {_KEYS}") from error
        except UsageError as error:  # attributes are sound: the service is set up otherwise
            raise CallError(Code.FAILED_PRECONDITION, str(error)) from error
        except LimitError as error:
            raise CallError(Code.RESOURCE_EXHAUSTED, str(error)) from error
        except DlfsError as error:
            raise CallError(code_of(error), str(error)) from error

    def bind(self, name: str, stage: str) -> None:
        """Mount the directory of a socket on a stage, read-only.

        Raises:
            CallError: FAILED_PRECONDITION: the driver does not see it.
        """
        try:
            with self._opened(_SOCKETS, SOCKET_PREFIX + name) as directory:
                os.makedirs(stage, mode=0o700, exist_ok=True)
                mount(f"/proc/self/fd/{directory}", stage, "", BIND, "")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CallError(
                Code.FAILED_PRECONDITION,
                f"access: service: expected the directory of the service's socket in {self._folder}"
                f"/{_SOCKETS}, got {error.strerror}; the service must be started with --sockets of "
                "this directory",
            ) from error
        kept = NO_SET_USER_ID | NO_DEVICES | NO_PROGRAMS
        mount("", stage, "", BIND | REMOUNT | READ_ONLY | kept, "")

    def is_shown(self, name: str, target: str) -> bool:
        """Return True if a target has the directory of a socket that is recorded as published.

        The service need not run: one that is started again listens at its recorded sockets.
        """
        try:
            with self._opened(_SOCKETS) as sockets:
                os.stat(f".{SOCKET_PREFIX}{name}.json", dir_fd=sockets, follow_symlinks=False)
                directory = os.stat(SOCKET_PREFIX + name, dir_fd=sockets, follow_symlinks=False)
                return os.path.samestat(directory, os.stat(target))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def withdraw(self, name: str) -> None:
        """Have the service close a socket, if it is published, and detach what none needs any more.

        If no service runs, the socket's record is removed instead, so that the next one has none.

        Raises:
            CallError: UNAVAILABLE: the service does not answer; FAILED_PRECONDITION: this driver
                does not know it.
        """
        self._check_service()
        if self._remove_files(SOCKET_PREFIX + name):
            return
        try:
            unpublish(f"unix:{self._control}", SOCKET_PREFIX + name, timeout_s=SERVICE_SECONDS)
        except NotFoundError:
            pass
        except DlfsError as error:
            raise CallError(Code.UNAVAILABLE, str(error)) from error

    def _remove_files(self, socket: str) -> bool:
        """Remove what a service has left of a socket. Returns False if a service runs."""
        with contextlib.ExitStack() as stack:
            try:
                sockets = stack.enter_context(self._opened(_SOCKETS))
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                lock = os.open(".lock", flags, dir_fd=sockets)
            except (FileNotFoundError, NotADirectoryError):
                return True
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f".{socket}.json", dir_fd=sockets)
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                self._opened(_SOCKETS, socket) as directory,
            ):
                for each in (SOCKET_NAME, NEW_SOCKET_NAME):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(each, dir_fd=directory)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.rmdir(socket, dir_fd=sockets)
            return True

    @contextlib.contextmanager
    def _opened(self, *names: str) -> Iterator[int]:
        """Open a directory below the service's without following links."""
        opened = os.open(self._folder, _DIRECTORY)
        try:
            for name in names:
                below = os.open(name, _DIRECTORY, dir_fd=opened)
                os.close(opened)
                opened = below
            yield opened
        finally:
            os.close(opened)

    def names(self) -> set[str]:
        """Return the names of the mounts for which sockets are recorded as published."""
        if not self._control:
            return set()
        try:
            files = os.listdir(self._folder / _SOCKETS)
        except FileNotFoundError:
            return set()
        return {
            file.removeprefix(f".{SOCKET_PREFIX}").removesuffix(".json")
            for file in files
            if file.startswith(f".{SOCKET_PREFIX}") and file.endswith(".json")
        }

    def answer(self, name: str) -> tuple[Answer, str]:
        """Return whether the service answers at a socket, and what is wrong, if anything."""
        path = self._folder / _SOCKETS / (SOCKET_PREFIX + name) / SOCKET_NAME
        try:
            get_statistics(f"unix:{path}", timeout_s=STATISTICS_SECONDS)
        except DlfsError as error:
            return Answer(State.SILENT), str(error)
        return Answer(State.ANSWERS), ""
