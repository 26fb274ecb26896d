"""Runs an import beside a training job, and says in every rank when it has failed.

Rank 0 starts ``dlfs import`` as a child process, by a thread that waits for its end: the system
ends the child if this thread, and so the rank, ends. The thread notes in the store of
``torch.distributed`` that it runs, and how the import has ended. A thread of every other rank reads
that. Without ``torch.distributed`` there is one rank.

If all ranks are to import, the import of rank 0 listens for workers. Its invitation, the right to
write to the volume, goes to the other ranks by a broadcast of their process group: the store may be
a file, and answers everyone. The thread of each of these ranks then runs workers.

Worker processes of a ``DataLoader`` see in shared memory that the import has failed.

Threads: one in each training process, until the import has ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from dlfs.adapters.torch.import_workers import CHILD, ImportWorkers, child_environment
from dlfs.adapters.torch.worker_memory import WorkerMemory
from dlfs.base.closing import Closing
from dlfs.base.forks import Event, OwnerProcess
from dlfs.base.wording import quote
from dlfs.errors import (
    AuthenticationError,
    DeviceError,
    DeviceLostError,
    DlfsError,
    FormatError,
    LockedError,
    NotFoundError,
    SpaceError,
    UsageError,
)
from dlfs.ingest.workers.invitation import ImportEndedError, Invitation

BEAT_S = 2.0
"""Time between two notes of rank 0 that it runs the import, in seconds."""
SILENCE_S = 120.0
"""Time without such a note after which the other ranks fail, in seconds."""
POLL_S = 0.1
"""Interval between two looks for the invitation of the import, in seconds."""

_TAIL_CHARACTERS = 4000
_ERRORS: dict[int, type[DlfsError]] = {
    2: UsageError,
    3: NotFoundError,
    4: FormatError,
    5: LockedError,
    6: SpaceError,
    7: DeviceError,
    8: AuthenticationError,
}
"""Class of the error for each exit code of the command line."""

_log = logging.getLogger("dlfs")


class ImportProcess(Closing):
    """An import that runs beside a training job.

    Args:
        name: name of the dataset, for errors.
        command: arguments of ``dlfs``; empty if there is nothing to import; None if another rank
            runs the import.
        store: store that all ranks share; None if there is one rank.
        key: begin of the keys in the store; equal on all ranks, and used once.
        workers: number of processes of each rank that import parts of the source; 0 if rank 0
            imports by itself.
        refusal: error for which rank 0 does not run the command, for all ranks.

    Attributes:
        failure: the error of the import; None unless it has failed.

    Threads: any at once.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] | None,
        store: Any,
        key: str,
        *,
        workers: int = 0,
        refusal: DlfsError | None = None,
    ) -> None:
        self._name, self._command, self._refusal = name, command, refusal
        self._store, self._key = store, key
        self._worker_count = workers
        self._takes_ranks = workers > 0 and store is not None
        self._invitation = ""
        self._has_invited = Event()
        self.failure: DlfsError | None = None
        self._flag = WorkerMemory(1)
        self._ended = Event()
        self._owner = OwnerProcess()
        self._process: subprocess.Popen[str] | None = None
        target = self._listen if command is None else self._run
        self._thread = threading.Thread(target=target, name="dlfs-import", daemon=True)
        self._thread.start()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: the shared memory."""
        return {"_name": self._name, "_flag": self._flag, "failure": None, "_owner": None}

    def check(self) -> None:
        """Raise the error of the import, if it has failed.

        Raises:
            DlfsError: as the import raised it.
        """
        if get_worker_info() is not None:
            trainer = multiprocessing.parent_process()
            if self._flag.words[0] or (trainer is not None and not trainer.is_alive()):
                raise DlfsError(
                    f"the import of {quote(self._name)} has failed, or the training process ended"
                )
            return
        if self.failure is not None:
            # A new object each time: its traceback is that of the loop that gets it.
            raise _copy(self.failure)

    def share(self) -> None:
        """Have the other ranks import as well, if they are to; all ranks call this.

        It waits until the import of rank 0 has listed the source.

        Raises:
            DlfsError: the import has failed before.
        """
        if not self._takes_ranks:
            return
        if self._command is not None:
            while not self._has_invited.wait(POLL_S):
                pass
            has_invited = bool(self._invitation)
        else:
            has_invited = self._wait_for_note()
        if has_invited:
            texts = [self._invitation]
            dist.broadcast_object_list(texts, src=0)
            self._invitation = texts[0]

    def _wait_for_note(self) -> bool:
        """Wait until rank 0 has noted whether it invites the others, and return that."""
        key = f"{self._key}/invites"
        try:
            while not self._store.check([key]):
                failure = self.failure
                # Rank 0 notes its failure last.
                if failure is not None and not self._store.check([key]):
                    raise _copy(failure)
                time.sleep(POLL_S)
            return bool(self._store.get(key) == b"1")
        except RuntimeError as error:
            raise self._silent(f"{error}") from error

    def close(self) -> None:
        """End the import, which can go on later, and the threads. Idempotent."""
        self._ended.set()
        if self._owner is None or not self._owner.is_current():
            return
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self._thread.join()

    # ---- rank 0 ----------------------------------------------------------------------------------

    def _run(self) -> None:
        failure = self._refusal
        try:
            if self._command:
                failure = _explain(self._name, *self._wait())
        except OSError as error:
            failure = DeviceError(f"start the import of {quote(self._name)}: {error}")
        finally:
            self._invite("")
        if failure is not None and self._ended.is_set():
            failure = DlfsError(f"import {quote(self._name)} while training: rank 0 has ended it")
        else:
            self._fail(failure)
        self._note("end", json.dumps(_encode(failure)))

    def _wait(self) -> tuple[int, str, str]:
        """Run the command; return its exit code and what it has written."""
        assert self._command
        if not self._takes_ranks:
            return self._run_command(self._command, None)
        # The directory, which is this user's alone, is deleted as soon as the file was read.
        with tempfile.TemporaryDirectory(prefix="dlfs-", ignore_cleanup_errors=True) as folder:
            verb, *rest = self._command
            file = os.path.join(folder, "join")
            return self._run_command([verb, "--join-file", file, *rest], folder)

    def _run_command(self, command: Sequence[str], folder: str | None) -> tuple[int, str, str]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the training loop
            env=child_environment(),
        )
        beat = 0
        while True:
            if self._ended.is_set() and process.poll() is None:
                process.kill()  # it was closed while the process started
            has_invited = folder is None or self._has_invited.is_set()
            try:
                output, errors = process.communicate(timeout=BEAT_S if has_invited else POLL_S)
            except subprocess.TimeoutExpired:
                if folder is not None and not has_invited:
                    self._find_invitation(folder)
                beat += 1
                self._note("beat", str(beat))
            else:
                return process.returncode, output, errors

    def _find_invitation(self, folder: str) -> None:
        """Invite the other ranks if the import listens."""
        with contextlib.suppress(NotFoundError):
            try:
                text = Invitation.read(os.path.join(folder, "join")).text
            except ImportEndedError:
                text = ""
            shutil.rmtree(folder, ignore_errors=True)
            self._invite(text)

    def _invite(self, text: str) -> None:
        """Let ``share`` go on, with the invitation of the import; empty if there is none."""
        if not self._has_invited.is_set():
            self._invitation = text
            self._note("invites", "1" if text else "0")
            self._has_invited.set()

    def _note(self, key: str, value: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the other ranks are gone, or see that it is
                self._store.set(f"{self._key}/{key}", value)

    # ---- other ranks -----------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._store is None:
            return
        heard, last = time.monotonic(), ""
        workers: ImportWorkers | None = None
        try:
            while not self._ended.wait(BEAT_S / 4):
                if self._invitation and workers is None:
                    workers = ImportWorkers(self._name, self._worker_count, self._invitation)
                if workers is not None:
                    workers.check()
                if self._store.check([f"{self._key}/end"]):
                    self._fail(_decode(json.loads(self._store.get(f"{self._key}/end"))))
                    return
                has_beat = self._store.check([f"{self._key}/beat"])
                beat = self._store.get(f"{self._key}/beat").decode() if has_beat else ""
                if beat != last:
                    heard, last = time.monotonic(), beat
                if time.monotonic() - heard > SILENCE_S:
                    self._fail(self._silent(f"nothing for {SILENCE_S:g} s"))
                    return
        except RuntimeError as error:
            self._fail(self._silent(f"{error}"))
        finally:
            if workers is not None:
                workers.close()

    def _silent(self, got: str) -> DlfsError:
        return DeviceLostError(
            f"wait for the import of {quote(self._name)}: expected a note of rank 0, which runs "
            f"it, got {got}"
        )

    def _fail(self, failure: DlfsError | None) -> None:
        if failure is not None:
            self._flag.words[0] = 1
            self.failure = failure


def _explain(name: str, code: int, output: str, errors: str) -> DlfsError | None:
    """Return the error of a command that has ended; None if it has imported."""
    text = errors.strip()[-_TAIL_CHARACTERS:]
    if output.strip():  # the report, also if bad records were left out
        if text:
            level = logging.WARNING if code else logging.INFO
            _log.log(level, "import %s: %s", quote(name), text)
        return None
    if code < 0:
        text = f"its process was ended by signal {-code}; the next run goes on with its steps"
    kind = _ERRORS.get(code, DlfsError)
    text = text.removeprefix("dlfs: ").removeprefix("error: ")
    return kind(f"import {quote(name)} while training: {text or f'exit code {code}'}")


def _encode(failure: DlfsError | None) -> list[str]:
    return [] if failure is None else [type(failure).__name__, str(failure)]


def _decode(values: list[str]) -> DlfsError | None:
    kinds = {kind.__name__: kind for kind in (*_ERRORS.values(), DlfsError)}
    return kinds.get(values[0], DlfsError)(values[1]) if values else None


def _copy(failure: DlfsError) -> DlfsError:
    return type(failure)(str(failure))
