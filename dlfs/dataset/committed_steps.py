"""``CommittedSteps``: the steps of an unfinished import as they are on its volume.

Other writers may commit between two steps: they move the steps to other chunks, add versions, or
abandon the import. So a ``StepWriter`` finds its steps anew whenever it locks the volume or reads.
The seal merges their journals while the volume is unlocked, with the version to append to, and
again if that is another one by then.

Threads: one at a time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from uuid import UUID

import numpy as np

from dlfs.attributes import AttributeNames
from dlfs.attributes.merging import check_columns
from dlfs.base.closing import closed_on_error
from dlfs.base.wording import list_names, quote
from dlfs.connection.previous_version import PreviousVersion, load_previous_version
from dlfs.connection.stored_samples import UNFINISHED, stored_step, stored_version
from dlfs.connection.unfinished import UnfinishedSteps, load_step
from dlfs.dataset.sealing import EncodedVersion, Stream, Tick, merge_samples
from dlfs.directory import FrozenDirectory
from dlfs.errors import ClosedError, DeviceError, FormatError, StaleError, UsageError
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.constants import RESERVED_PREFIX
from dlfs.format.geometry import ChunkRun
from dlfs.format.journal import Term, find_term
from dlfs.store.info import read_origin
from dlfs.store.locking import when_unlocked
from dlfs.store.space import count_chunks
from dlfs.store.transaction import Generation, Transaction

PAUSE_S = 0.03
"""Time between two steps in which another writer can lock the volume, in seconds: a writer that
waits for the lock tries every 10 ms."""
LOCK_TIMEOUT_S = 3600.0
"""Longest wait for the lock that another writer has between two steps, in seconds."""
DAMAGED = "its journal is damaged, so the import cannot go on: 'dlfs import --abandon' frees it"
MERGES_MAX = 3
"""Attempts to merge the samples with the newest version while the volume is unlocked."""

_T = TypeVar("_T")


def digest_labels(labels: Mapping[str, int]) -> str:
    """Return a text that differs for other classes or labels; empty without any."""
    encoded = json.dumps(sorted(labels.items())).encode()
    return hashlib.blake2b(encoded, digest_size=8).hexdigest() if labels else ""


def let_others_lock() -> None:
    """Wait between two steps."""
    time.sleep(PAUSE_S)


class CommittedSteps:
    """The steps of an unfinished import on its volume, and the version to append to.

    Args:
        begin: starts a transaction.
        read: opens the newest generation of the volume for reading.
        name: name of the dataset.
        choose_base: returns the version to append to; None: the version is a new one.
        defaults: value of each attribute for samples without one.

    Attributes:
        steps: the steps as they were found last; None before the first.
        previous: the version to append to, as it was at the start; None without.
        term: term of this coordinator; None of an import without workers.
        is_cancelled: True if ``lock`` shall not wait for another writer any more.
    """

    def __init__(
        self,
        begin: Callable[[], Transaction],
        read: Callable[[], AbstractContextManager[Generation]],
        name: bytes,
        choose_base: Callable[[Catalog], DatasetRecord] | None,
        defaults: Mapping[str, Any],
    ) -> None:
        self._begin = begin
        self._read = read
        self._name = name
        self._choose_base = choose_base
        self._defaults = defaults
        self.steps: UnfinishedSteps | None = None
        self.previous: PreviousVersion | None = None
        self.term: Term | None = None
        self.is_cancelled = False
        self._loaded: list[FrozenDirectory] = []

    def lock(self, timeout_s: float = LOCK_TIMEOUT_S) -> Transaction:
        """Start the next transaction; the import must be as the last one left it."""

        def begin() -> Transaction:
            if self.is_cancelled:
                raise ClosedError(f"import {quote(self._name)}: cancelled while it waits to commit")
            return self._begin()

        let_others_lock()
        transaction = when_unlocked(begin, timeout_s)
        with closed_on_error(transaction):
            self.steps = self._found(transaction.base)
        return transaction

    def _found(self, generation: Generation) -> UnfinishedSteps:
        """Return the steps with the record of a generation: its chunks may have been moved.

        Raises:
            StaleError: the import is not as the last step left it.
        """
        assert self.steps is not None
        found = generation.catalog.find_unfinished(self._name)
        known = self.steps.record
        self.check_term(generation)
        if found is None or (found.uuid, found.journal_bytes) != (known.uuid, known.journal_bytes):
            raise self._stale(found)
        return self.steps.with_record(found)

    def check_term(self, generation: Generation) -> None:
        """Check that no other writer has taken the import over.

        Raises:
            StaleError: another one has, or the import is gone.

        Threads: any.
        """
        assert self.steps is not None
        found = generation.catalog.find_unfinished(self._name)
        is_ours = found is not None and found.uuid == self.steps.record.uuid
        if found is None or not is_ours or find_term(found.tags) != self.term:
            raise self._stale(found)

    def _stale(self, found: DatasetRecord | None) -> StaleError:
        what = "it is gone" if found is None else "another writer has gone on with it"
        return StaleError(
            f"go on with the unfinished import of {quote(self._name)}: expected it as the "
            f"last step left it, but {what}"
        )

    def find_base(self, generation: Generation) -> DatasetRecord | None:
        """Return the version to append to in a generation; None without."""
        return None if self._choose_base is None else self._choose_base(generation.catalog)

    # ---- paths -----------------------------------------------------------------------------------

    def find_known(self, paths: Sequence[bytes]) -> set[bytes]:
        """Return those of some paths that samples of the steps, or of ``previous``, have.

        Memory: the directories of the steps, about 32 bytes a sample and its path, from the first
        call on.

        Raises:
            FormatError, DeviceError: as ``load_step``.
        """
        self._load_directories()
        known: set[bytes] = set()
        before = [] if self.previous is None else [self.previous.directory]
        for directory in (*before, *self._loaded):
            places = directory.find(paths)
            known.update(paths[number] for number in np.flatnonzero(places >= 0).tolist())
        return known

    def kept_paths(self) -> Iterator[bytes]:
        """Yield the paths of the samples of all steps so far; see ``find_known`` for memory."""
        self._load_directories()
        for directory in self._loaded:
            yield from directory.names()

    def _load_directories(self) -> None:
        """Load the directories of the steps that are not loaded yet."""
        steps = () if self.steps is None else self.steps.steps[len(self._loaded) :]
        if not steps:
            return
        with self._read() as generation:
            record = self._found(generation).record
            for step in steps:
                self._loaded.append(load_step(generation, record, step)[0])

    def release_directories(self) -> None:
        """Release the memory of ``find_known``."""
        while self._loaded:
            self._loaded.pop().close()

    # ---- merging ---------------------------------------------------------------------------------

    def merge_and_lock(
        self, directories: Sequence[bytes], *, second: bool, tick: Tick
    ) -> tuple[Transaction, EncodedVersion, DatasetRecord | None]:
        """Merge the samples of a pass while the volume is unlocked, then lock it.

        If another writer has committed another version to append to meanwhile, this is done again;
        at last while the volume is locked.

        Args:
            directories: paths of directories without samples.
            second: True for the samples of the second pass.
            tick: see ``sealing.Tick``.

        Returns:
            The transaction, the merged samples, and the version that is appended to.
        """

        def merge(
            generation: Generation, steps: UnfinishedSteps
        ) -> tuple[EncodedVersion, UUID | None]:
            base = self.find_base(generation)
            of_pass = steps.of_pass(second=second).in_order()
            encoded = self._merge(generation, of_pass, base, directories, tick)
            return encoded, None if base is None else base.uuid

        if self.previous is not None:
            self.previous.close()
        for _ in range(MERGES_MAX):
            encoded, merged = self.read_journal(merge)
            transaction = self.lock()
            with closed_on_error(transaction):
                base = self.find_base(transaction.base)
            if merged == (None if base is None else base.uuid):
                return transaction, encoded, base
            transaction.close()
        transaction = self.lock()
        with closed_on_error(transaction):
            encoded, _ = self.read_journal(merge, lambda: nullcontext(transaction.base))
            return transaction, encoded, self.find_base(transaction.base)

    def read_journal(
        self,
        use: Callable[[Generation, UnfinishedSteps], _T],
        read: Callable[[], AbstractContextManager[Generation]] | None = None,
    ) -> _T:
        """Return what a function makes of the journal, and of the version to append to.

        Others may move the journal meanwhile; then it is read again where it is now.
        """
        read = read or self._read
        while True:
            with read() as generation:
                steps = self.steps = self._found(generation)
                base = self.find_base(generation)
                try:
                    return use(generation, steps)
                except (FormatError, DeviceError) as error:
                    with read() as newest:
                        now = self._found(newest).record, self.find_base(newest)
                    if _places(*now) != _places(steps.record, base):
                        continue
                    if isinstance(error, FormatError) and UNFINISHED in str(error):
                        error.add_note(DAMAGED)  # a step is, and not the version before
                    raise

    def _merge(
        self,
        generation: Generation,
        steps: UnfinishedSteps,
        base: DatasetRecord | None,
        directories: Sequence[bytes],
        tick: Tick,
    ) -> EncodedVersion:
        streams, columns, first = [], steps.columns, 0
        if base is not None:
            self._check_base(generation, base, steps)
            stored = stored_version(generation, base)
            first = count_chunks(base.split_data_runs(generation.geometry.chunk_bytes)[0])
            streams.append(Stream(stored, 0, first))
            columns = stored.columns.dtypes | columns
        for step in steps.steps:
            header, stored = step.header, stored_step(generation, steps.record, step)
            streams.append(Stream(stored, first + header.first_chunk, header.chunk_count))
        return merge_samples(
            streams,
            uuid=steps.record.uuid,
            chunk_bytes=generation.geometry.chunk_bytes,
            directories=directories,
            columns=columns,
            defaults=AttributeNames(self._defaults).stored_defaults,
            encoder=steps.encoder,
            tick=tick,
        )

    def _check_base(
        self, generation: Generation, base: DatasetRecord, steps: UnfinishedSteps
    ) -> None:
        """Check that the samples of the steps can be appended to a version.

        Raises:
            UsageError: they have other attributes or fields than the version has, because another
                writer has made it since the import began.
        """
        if self.previous is not None and base.uuid == self.previous.record.uuid:
            return
        previous = load_previous_version(generation, base)
        with previous:
            what = f"append to version {base.version} of {quote(self._name)}, which is new"
            check_columns(what, previous.columns, steps.columns)
            differing = (previous.names ^ steps.names) - self._defaults.keys()
            differing = frozenset(n for n in differing if not n.startswith(RESERVED_PREFIX))
            texts = [each and each.text for each in (previous.encoder, steps.encoder)]
            if base.sample_count and (differing or texts[0] != texts[1]):
                difference = f"attributes {list_names(differing)}" if differing else "fields"
                raise UsageError(
                    f"{what}: expected the {difference} in both, or in neither, of its samples and "
                    "those of the import, which began before; free it with 'dlfs import "
                    "--abandon', and import them anew"
                )
            if digest_labels(previous.labels()) != read_origin(steps.record).get("labels", ""):
                raise UsageError(
                    f"{what}: expected the classes and labels that the dataset had when the import "
                    "began; free it with 'dlfs import --abandon', and import all classes anew"
                )


def _places(
    record: DatasetRecord, base: DatasetRecord | None
) -> tuple[tuple[ChunkRun, ...], UUID | None, tuple[ChunkRun, ...]]:
    """Return where an import's journal and the version to append to are."""
    if base is None:
        return record.journal_runs, None, ()
    return record.journal_runs, base.uuid, (*base.data_runs, *base.directory_runs)
