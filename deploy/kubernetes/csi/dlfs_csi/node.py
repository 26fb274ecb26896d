"""The node service: publishes volumes at target paths of this node, and takes them away.

The actors of one volume that is published as files: the mount, first on a stage, then at its
target; the holder, which keeps the mount's descriptor; a server, which takes it from the holder and
answers; the record of this driver (``records``), which is written before any of them exists and
removed after all are gone. A volume that is published as a socket of the node service (``sockets``)
has a bind mount, the record, and the socket. Each of them may end at any time, this driver too.
``look_after`` brings together what there is: it starts servers that have ended, mounts anew what is
dead, and removes what a call left that did not end.

One call, or look, has a target at a time; another call for it fails with ABORTED.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlfs.errors import DlfsError, LimitError
from dlfs.mount.supervise.holder import Held, deposit, drop, list_held
from dlfs_csi import DRIVER_NAME
from dlfs_csi.context import (
    SERVICE,
    MountSpec,
    check_capability,
    check_id,
    invalid,
    own_attributes,
    parse_attributes,
    pod_note,
)
from dlfs_csi.failures import CallError, Code, code_of
from dlfs_csi.keys import KeyFolders, check_secrets, missing_keys
from dlfs_csi.launching import Launch, Launcher
from dlfs_csi.mounts import (
    Answer,
    Questions,
    State,
    clear_stage,
    detach_all,
    layers,
    mount_stage,
    prepare,
    remove,
    show,
)
from dlfs_csi.records import Record, Records, name_of
from dlfs_csi.sockets import ServiceSockets

PUBLISH_SECONDS = 60.0
"""Time for a server to answer where a call has no deadline, in seconds."""
PUBLISH_SECONDS_MAX = 600.0
"""Longest time for a server to answer, in seconds."""
UNDO_SECONDS = 2.0
"""Time of a call that is left to undo what it did, in seconds; at most half of all that it has."""
STATISTICS_SECONDS = 5.0
"""Longest wait for the answer of a mount that is asked for its space, in seconds."""
DEAD_SECONDS = 1.0
"""Longest wait for the answer of a mount whose server may be gone, in seconds."""
RESTART_SECONDS_MAX = 30.0
"""Longest pause between two servers of a mount, in seconds; each is twice the one before."""
LOOKS_MAX = 8
"""Most volumes that are looked after at a time."""
TARGET_BYTES_MAX = 4000
NOTE_CHARACTERS = 500
"""Longest part of a target path in the holder's note, where one character may take 6 bytes."""

_PAUSE_S = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger(__name__)


class Taken:
    """The mounts that calls are working on, by their names.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    @contextlib.contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Have a mount for one call.

        Raises:
            CallError: ABORTED: another call has it.
        """
        with self._lock:
            if name in self._taken:
                raise CallError(Code.ABORTED, "another call for this target path is under way")
            self._taken.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._taken.discard(name)


@dataclass
class _Restarts:
    """Servers of one mount that ended one after the other."""

    count: int = 0
    next_s: float = 0.0


class Node:
    """The node service.

    Args:
        records: the records of this driver.
        keys: the directories of keys.
        launcher: starts servers.
        sockets: the sockets of the node service.
        stages: directory of the stages of mounts; what an earlier driver left there is cleared.
        holder: the folder of the holder.
        server_uid: the user that servers run as.
        volumes_max: most volumes that may be published on this node.

    Threads: any.
    """

    def __init__(
        self,
        *,
        records: Records,
        keys: KeyFolders,
        launcher: Launcher,
        sockets: ServiceSockets,
        stages: Path,
        holder: str,
        server_uid: int,
        volumes_max: int,
    ) -> None:
        self._records = records
        self._keys = keys
        self._launcher = launcher
        self._sockets = sockets
        self._stages = stages
        self._holder = holder
        self._server_uid = server_uid
        self.volumes_max = volumes_max
        self._taken = Taken()
        self._questions = Questions()
        self._room = threading.Lock()
        self._restarts: dict[str, _Restarts] = {}
        self._told: dict[str, str] = {}
        stages.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in os.listdir(stages):
            clear_stage(self._stage(name))

    def _stage(self, name: str) -> str:
        return str(self._stages / name)

    # ---- NodePublishVolume -----------------------------------------------------------------------

    def publish(self, request: Any, seconds: float | None) -> None:
        """Publish a volume at a target path, or find that it is published there.

        Args:
            request: a NodePublishVolumeRequest.
            seconds: time that the call has; None if it has no deadline.

        Raises:
            CallError: it is not published, and nothing of it is left.
        """
        began_s = time.monotonic()
        check_id(request.volume_id)
        target = check_target(request.target_path)
        if not request.HasField("volume_capability"):
            raise invalid("volume_capability: expected one, got none")
        context = dict(request.volume_context)
        check_capability(request.volume_capability, context, readonly=request.readonly)
        spec = parse_attributes(context)
        self._launcher.check(spec)
        secrets = dict(request.secrets)
        check_secrets(secrets)
        if spec.access == SERVICE:
            self._sockets.check(spec, context, secrets)
        record = Record(
            target,
            request.volume_id,
            own_attributes(context),
            int(request.volume_capability.access_mode.mode),
            has_keys=bool(secrets),
            note=pod_note(context),
        )
        has_s = PUBLISH_SECONDS if seconds is None else min(seconds, PUBLISH_SECONDS_MAX)
        deadline_s = began_s + has_s - min(UNDO_SECONDS, has_s / 2)
        with self._taken.take(name_of(target)):
            try:
                if self._is_published(record, secrets, deadline_s):
                    return
                prepare(target)
            except (DlfsError, OSError) as error:
                raise self._failure(error, spec, secrets) from error
            try:
                self._reserve(record)
                self._keys.write(record.name, secrets)
                self._mount(record, spec, deadline_s)
                self._records.put(replace(record, published=True))
            except BaseException as error:
                try:
                    self._undo(target)
                except CallError as left:  # the next look, or call, undoes it
                    _log.error("%s: %s", target, left)
                raise self._failure(error, spec, secrets) from error

    def _is_published(self, record: Record, secrets: dict[str, str], deadline_s: float) -> bool:
        """Return True if a volume is published as asked; remove what is of no use otherwise.

        Raises:
            CallError: ALREADY_EXISTS: another volume is published there.
        """
        found = self._records.get(record.target)
        mounted = bool(layers(record.target))
        if found is not None and found.published and mounted:
            same = replace(record, published=True, has_keys=found.has_keys, note=found.note)
            if found != same:
                raise CallError(Code.ALREADY_EXISTS, _difference(found, record))
            self._keys.write(record.name, secrets)
            if found.has_keys != record.has_keys:
                self._records.put(replace(found, has_keys=record.has_keys))
            if self._revive(found, deadline_s):
                return True
        if found is not None or mounted:
            self._undo(record.target)
        return False

    def _revive(self, record: Record, deadline_s: float) -> bool:
        """Wait until a mount answers again. Returns False if it is dead."""
        if record.by_service:
            self._restore_socket(record)
            return True
        self._supply_server(record, self._held().get(record.name))
        while True:
            left_s = deadline_s - time.monotonic()
            state = self._questions.state(record.target, min(max(left_s, 0.0), DEAD_SECONDS)).state
            if state is not State.SILENT:
                return state is State.ANSWERS
            if left_s <= 0:
                raise _late(record.target)

    def _reserve(self, record: Record) -> None:
        """Write the record of a volume, if the node has room for another one.

        Raises:
            CallError: RESOURCE_EXHAUSTED: it has not.
        """
        with self._room:
            count = self._records.count()
            if count >= self.volumes_max:
                raise CallError(
                    Code.RESOURCE_EXHAUSTED,
                    f"publish {record.volume_id}: expected at most {self.volumes_max} volumes on "
                    f"this node, which has {count}",
                )
            self._records.put(record)

    def _mount(self, record: Record, spec: MountSpec, deadline_s: float) -> None:
        """Mount a volume, and wait until its server answers."""
        if record.by_service:
            self._show_socket(record, spec)
            return
        stage = self._stage(record.name)
        folder = self._deposit(record, stage)
        self._start(record, spec, folder)
        self._await(record, lambda: os.statvfs(stage), deadline_s)
        self._show(record, spec, deadline_s)

    def _show(self, record: Record, spec: MountSpec, deadline_s: float) -> None:
        """Show a volume, whose server answers, at its target."""
        stage = self._stage(record.name)
        try:
            self._await(record, lambda: show(stage, spec.dataset, record.target), deadline_s)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CallError(
                Code.NOT_FOUND, f"attribute 'dataset': the volume has no {spec.dataset!r}"
            ) from error
        clear_stage(stage)

    def _show_socket(self, record: Record, spec: MountSpec) -> None:
        """Have the service publish a socket, and show its directory at the target."""
        stage = self._stage(record.name)
        clear_stage(stage)
        self._sockets.publish(record.name, spec, record.note)
        self._sockets.bind(record.name, stage)
        show(stage, "", record.target)
        clear_stage(stage)

    def _restore_socket(self, record: Record) -> None:
        """Publish a socket again if the service has lost its records; else it listens by itself."""
        if not self._sockets.is_shown(record.name, record.target):
            _log.error("%s: the service has lost its socket: publishing anew", record.target)
            self._show_socket(record, parse_attributes(record.attributes))

    def _deposit(self, record: Record, stage: str) -> str:
        """Mount a file system, and give it to the holder. Returns the mount's folder there."""
        target, name = record.target, record.name
        kernel, device = mount_stage(stage)
        try:
            note = json.dumps({"by": DRIVER_NAME, "target": target[:NOTE_CHARACTERS]})
            return deposit(
                self._holder, name, kernel, device=device, uid=self._server_uid, note=note
            )
        except DlfsError as error:
            raise _holder_failure(error) from error
        finally:
            os.close(kernel)

    def _start(self, record: Record, spec: MountSpec, folder: str) -> None:
        keys = self._keys.path(record.name) if record.has_keys else None
        self._launcher.start(Launch(record.name, folder, keys, spec))

    def _await(self, record: Record, call: Any, deadline_s: float) -> object:
        """Return the result of a call that the mount on its stage answers, once its server does.

        Raises:
            CallError: the server has ended, or does not answer in time.
            OSError: the call failed.
        """
        answers = None
        while time.monotonic() < deadline_s:
            # A question to the mount of an attempt before may not have ended yet.
            answers = answers or self._questions.ask(self._stage(record.name), call)
            if answers is None:
                time.sleep(_PAUSE_S)
            else:
                with contextlib.suppress(queue.Empty):
                    result = answers.get(timeout=_PAUSE_S)
                    if isinstance(result, OSError):
                        raise result
                    return result
            failure = self._launcher.failure(record.name)
            if failure is not None:
                raise failure
        raise _late(record.target)

    def _failure(
        self, error: BaseException, spec: MountSpec, secrets: dict[str, str]
    ) -> BaseException:
        """Return the failure of a call that an error has ended."""
        if isinstance(error, CallError):
            lacking = missing_keys(spec.volumes, secrets)
            if error.code is Code.UNAUTHENTICATED and lacking and spec.access != SERVICE:
                return CallError(error.code, f"{error}; the Secret of the volume lacks {lacking}")
            return error
        if isinstance(error, DlfsError):
            return CallError(code_of(error), str(error))
        if isinstance(error, OSError):
            code = Code.RESOURCE_EXHAUSTED if error.errno in _FULL else Code.INTERNAL
            return CallError(code, f"publish: {error}")
        return error

    # ---- NodeUnpublishVolume ---------------------------------------------------------------------

    def unpublish(self, request: Any) -> None:
        """Take a volume away from a target path, if it is there.

        Args:
            request: a NodeUnpublishVolumeRequest.

        Raises:
            CallError: something of it is left; another call removes the rest.
        """
        check_id(request.volume_id)
        target = check_target(request.target_path)
        with self._taken.take(name_of(target)):
            found = self._records.get(target)
            if found is not None and found.volume_id != request.volume_id:
                raise CallError(
                    Code.NOT_FOUND,
                    f"unpublish {target}: expected volume {found.volume_id!r}, which is there, got "
                    f"{request.volume_id!r}",
                )
            self._undo(target)

    def _undo(self, target: str) -> None:
        """Remove everything that a published volume consists of, the record last."""
        name = name_of(target)
        found = self._records.get(target)
        if found is not None and found.published:
            with contextlib.suppress(OSError):  # what a full disk must not keep published
                self._records.put(replace(found, published=False))
        try:
            clear_stage(self._stage(name))
            detach_all(target)
        except DlfsError as error:
            if found is not None:
                raise CallError(Code.UNAVAILABLE, str(error)) from error
        if found is not None and found.by_service:
            self._sockets.withdraw(name)
        else:
            self._end_server(name, is_known=found is not None)
        try:
            remove(target)
        except CallError:
            if found is not None:
                raise
        self._records.remove(target)
        self._restarts.pop(name, None)
        self._told.pop(target, None)

    def _end_server(self, name: str, *, is_known: bool) -> None:
        """Take a mount from the holder, and remove its server and its keys."""
        try:
            drop(self._holder, name)
        except DlfsError as error:
            # A holder that is not there has nothing; one that does not answer is asked again.
            if is_known and not isinstance(error, LookupError):
                raise _holder_failure(error) from error
        self._launcher.stop(name)
        self._keys.remove(name)

    # ---- NodeGetVolumeStats ----------------------------------------------------------------------

    def statistics(self, volume_id: str, path: str) -> tuple[Answer, str]:
        """Return the answer of a published volume's mount, and what is wrong with it, if anything.

        Raises:
            CallError: INVALID_ARGUMENT; NOT_FOUND: the volume is not published there.
        """
        check_id(volume_id)
        if not path:
            raise invalid("volume_path: expected a path, got none")
        found = self._records.get(path)
        if found is None or found.volume_id != volume_id or not layers(path):
            raise CallError(Code.NOT_FOUND, f"volume {volume_id!r} is not published at {path}")
        if found.by_service:
            return self._sockets.answer(found.name)
        answer = self._questions.state(path, STATISTICS_SECONDS)
        if answer.state is State.ANSWERS:
            return answer, ""
        if answer.state is State.DEAD:
            return answer, "the mount is dead (ENOTCONN): its holder and its server have ended"
        failure = self._launcher.failure(found.name)
        reason = f"; {failure}" if failure else ""
        return answer, f"no server has answered for {STATISTICS_SECONDS:g} s{reason}"

    # ---- what no call asks for -------------------------------------------------------------------

    def check_ready(self) -> None:
        """Check that volumes can be published.

        Raises:
            CallError: FAILED_PRECONDITION: /dev/fuse or the holder is missing.
        """
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise CallError(
                Code.FAILED_PRECONDITION, f"open /dev/fuse: {error.strerror}; 'modprobe fuse'"
            ) from error
        try:
            self._held()
        except CallError as error:
            raise CallError(Code.FAILED_PRECONDITION, str(error)) from error

    def _held(self) -> dict[str, Held]:
        try:
            return {held.name: held for held in list_held(self._holder)}
        except DlfsError as error:
            raise _holder_failure(error) from error

    def look_after(self) -> None:
        """Bring every published volume to work, and remove what belongs to none.

        Raises:
            CallError: the holder, or the cluster, does not answer; call again.
        """
        held = self._held()

        def look(record: Record) -> None:
            try:
                with self._taken.take(record.name):
                    self._look_after(record.target, held.get(record.name))
            except (CallError, DlfsError, OSError) as error:
                if not isinstance(error, CallError) or error.code is not Code.ABORTED:
                    self._tell(record.target, str(error))

        with ThreadPoolExecutor(LOOKS_MAX, thread_name_prefix="look") as pool:
            list(pool.map(look, self._records.all()))
        self._remove_strays()

    def _tell(self, target: str, text: str) -> None:
        """Write to the log what is wrong with a target, unless it is what was written last."""
        if self._told.get(target) != text:
            self._told[target] = text
            _log.warning("%s: %s", target, text)

    def _look_after(self, target: str, held: Held | None) -> None:
        record = self._records.get(target)  # again, now that no call has the target
        if record is None:
            return
        shown = layers(target)
        if record.by_service and not (record.published and shown) and not self._is_due(record.name):
            return  # a service that does not answer is asked now and then
        if not record.published:
            self._undo(target)
            _log.warning("%s: removed what a call had left that did not end", target)
        elif not shown:
            self._undo(target)
            _log.warning("%s: it was not mounted any more: removed what was left", target)
        elif record.by_service:
            if self._sockets.is_shown(record.name, target):
                self._restarts.pop(record.name, None)
            elif self._is_due(record.name):
                self._restore_socket(record)
        elif held is not None and held.present and held.device == shown[-1].device:
            self._supply_server(record, held)
        elif held is not None and held.present and self._is_staged(held):
            self._supply_server(record, held)
            if held.answers:
                spec = parse_attributes(record.attributes)
                self._show(record, spec, time.monotonic() + STATISTICS_SECONDS)
        elif self._questions.state(target, DEAD_SECONDS).state is State.DEAD:
            self._mount_anew(record)

    def _is_staged(self, held: Held) -> bool:
        """Return True if a mount that is made anew is on its stage, and not at its target yet."""
        return any(found.device == held.device for found in layers(self._stage(held.name)))

    def _supply_server(self, record: Record, held: Held | None) -> None:
        """Start a server of a mount that has none, with pauses between those that fail."""
        if held is None or not held.present:
            return
        if held.server_pid is not None:
            if held.answers:
                self._restarts.pop(record.name, None)
            return
        failure = self._launcher.failure(record.name)
        if failure is not None:
            if not self._is_due(record.name):
                return
            _log.error("%s: %s; starting another", record.target, failure)
        folder = os.path.join(self._holder, "mounts", record.name)
        self._start(record, parse_attributes(record.attributes), folder)

    def _is_due(self, name: str) -> bool:
        """Return True if the pause after the last attempt is over; the next one is longer."""
        restarts = self._restarts.setdefault(name, _Restarts())
        now_s = time.monotonic()
        if now_s < restarts.next_s:
            return False
        restarts.count += 1
        restarts.next_s = now_s + min(2.0 ** (restarts.count - 1), RESTART_SECONDS_MAX)
        return True

    def _mount_anew(self, record: Record) -> None:
        """Replace a dead mount: programs that look up the target afterwards find the new one.

        Its server is started. When that answers, a later look shows the new mount; until then the
        target shows the dead one: ENOTCONN, and not a directory without files.
        """
        if not self._is_due(record.name):
            return
        _log.error("%s: the mount is dead: mounting anew", record.target)
        self._withdraw(record.name)
        try:
            folder = self._deposit(record, self._stage(record.name))
            self._start(record, parse_attributes(record.attributes), folder)
        except (CallError, DlfsError, OSError) as error:
            _log.error("%s: %s", record.target, error)
            self._withdraw(record.name)

    def _withdraw(self, name: str) -> None:
        """Remove the mount on a stage, what the holder has of it, and its server."""
        clear_stage(self._stage(name))
        with contextlib.suppress(DlfsError):
            drop(self._holder, name)
        self._launcher.stop(name)

    def _remove_strays(self) -> None:
        """Remove what belongs to no record: a call was killed, or a record was lost."""
        names = self._launcher.names() | set(self._keys.names()) | self._sockets.names()
        for held in self._held().values():
            with contextlib.suppress(ValueError, AttributeError):
                if json.loads(held.note).get("by") == DRIVER_NAME:
                    names.add(held.name)
        for name in sorted(names - self._records.names()):
            with contextlib.suppress(CallError), self._taken.take(name):
                if name not in self._records.names():
                    self._remove_stray(name)

    def _remove_stray(self, name: str) -> None:
        if name in self._sockets.names():
            _log.warning("removing the socket of mount %s, which has no record", name)
            self._sockets.withdraw(name)
            return
        _log.warning("removing the server and the keys of mount %s, which has no record", name)
        self._end_server(name, is_known=False)


def check_target(target: str) -> str:
    """Check a target path, and return it.

    Raises:
        CallError: INVALID_ARGUMENT: it is missing, too long, or not an absolute path in its
            simplest form.
    """
    if not target:
        raise invalid("target_path: expected an absolute path, got none")
    if (
        "\0" in target
        or not target.startswith("/")
        or target.startswith("//")
        or os.path.normpath(target) != target
        or len(os.fsencode(target)) > TARGET_BYTES_MAX
    ):
        raise invalid(
            f"target_path: expected an absolute path without '..' of at most {TARGET_BYTES_MAX} "
            f"bytes, got {target[:200]!r}"
        )
    return target


def _difference(found: Record, asked: Record) -> str:
    """Return how a volume that is published differs from the one that a call asks for."""
    for what, there, wanted in (
        ("volume", found.volume_id, asked.volume_id),
        ("access mode", found.mode, asked.mode),
        ("attributes", found.attributes, asked.attributes),
    ):
        if there != wanted:
            return f"publish at {asked.target}: expected {what} {wanted!r}, {there!r} is there"
    return f"publish at {asked.target}: another volume is there"


def _holder_failure(error: DlfsError) -> CallError:
    code = Code.UNAVAILABLE
    if isinstance(error, LimitError):
        code = Code.RESOURCE_EXHAUSTED
    return CallError(code, str(error))


def _late(target: str) -> CallError:
    return CallError(Code.DEADLINE_EXCEEDED, f"{target}: no server answered in time")
