"""``StorageWriter``: saves the checkpoints of ``torch.distributed.checkpoint`` to a volume.

Each rank writes its own shards; then the coordinator commits the metadata. Before that commit no
part of the new checkpoint is visible, and the earlier checkpoints stay as they are. A save that
failed or was killed leaves at most unused shards, which the next save of the same name removes.

``async_save`` copies the state by ``stage``: in the training thread, or with ``async_staging`` in
another one. It calls the other methods from another thread or another process, to which the writer
is pickled.

Threads: one save at a time, from ``reset`` to the end of its thread; ``stage`` at any time.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future as CopyFuture
from typing import Any
from uuid import uuid4

import numpy as np
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import dlfs
from dlfs.adapters.torch.checkpoint.layout import (
    HasCheckpointId,
    check_id,
    check_part,
    commit,
    find_last_metadata,
    open_volume,
    read_metadata,
    remove_outdated,
    remove_unused,
    shards_dataset,
)
from dlfs.adapters.torch.checkpoint.metadata import Piece
from dlfs.adapters.torch.checkpoint.objects import load_restricted
from dlfs.adapters.torch.checkpoint.pieces import Item, ShardWriter, tensor_bytes
from dlfs.adapters.torch.checkpoint.staging import StagedState, Stager
from dlfs.base.arguments import check_integer
from dlfs.base.wording import quote
from dlfs.errors import DlfsError, FormatError, UsageError

LOCK_TIMEOUT_S = 600.0
"""Default time to wait for the volume's lock, which the ranks have one after the other."""

REMOVAL_TIMEOUT_S = 5.0
"""Time to wait for the lock to remove old checkpoints; after that the next save does it."""

END_TIMEOUT_S = 1.0
"""Time to wait for the thread of an ``async_save`` that has its result and is about to end."""

KEEP_MAX = 1 << 31

_log = logging.getLogger("dlfs.checkpoint")


class StorageWriter(HasCheckpointId, TorchStorageWriter, AsyncStager):
    """Saves checkpoints to a volume, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    A tensor's bytes that the last checkpoint has already are shared with it and not written again.
    One writer object serves any number of saves; each has a ``checkpoint_id``, such as the step.
    An id that exists is replaced atomically. Only one job at a time may save under a name.

    ``async_save`` holds up training for the copy of the state in memory only. Wait for its result
    before the next one: a save that begins while another is in progress fails with UsageError, and
    the other goes on. With ``async_staging`` the copy goes on in the background as well;
    ``async_save`` then returns torch's ``AsyncSaveResponse``, and the state must not change until
    its ``staging_completion`` is done.

    Args:
        volume: URIs or paths of the volume's members, as for ``dlfs.open``.
        name: name of the run; no ``:``, ``@``, ``/`` or spaces.
        keep: complete checkpoints of this name that stay, >= 1; older ones are removed after each
            save. Their bytes stay while a newer checkpoint shares them. None removes nothing.
        lock_timeout_s: time to wait for the volume, which one rank at a time may write to.
        async_staging: copy the state in the background, during the forward and backward pass of the
            next step.

    Raises:
        UsageError: the name or ``keep`` is not allowed, or the volume is a service.
    """

    def __init__(
        self,
        volume: str | Sequence[str],
        name: str = "checkpoint",
        *,
        keep: int | None = None,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        async_staging: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(volume, str) and volume.startswith("unix:"):
            raise UsageError(f"save checkpoints through {volume}: a service is read-only")
        if keep is not None:
            check_integer(keep, 1, KEEP_MAX, option="keep", action="save checkpoints")
        self.volume = volume if isinstance(volume, str) else tuple(volume)
        self.name = check_part(name, "a name")
        self.keep = keep
        self.lock_timeout_s = lock_timeout_s
        self.async_staging = async_staging
        self._step: str | None = None
        self._written_step: str | None = None
        self._save_id = ""
        self._checked: set[str] = set()
        """Objects other than tensors that were checked to be loadable, by name."""
        self._saving = False
        self._saver: threading.Thread | None = None
        """Thread of the save in progress; also after its end, unless it committed."""
        self._stager = Stager()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stager": None, "_saving": False, "_saver": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stager = Stager()

    # ---- copies for async_save -------------------------------------------------------------------

    _synchronize_after_execute = False  # the copy is complete when ``stage`` or its future ends

    def stage(self, state_dict: dict[str, Any]) -> StagedState | CopyFuture[StagedState]:
        """Return a copy of a state in the CPU's memory; with ``async_staging``, its future.

        The first call allocates the memory and takes longer than later ones. Call it once before
        training, and drop the result, to do that in advance.
        """
        return (self._stager.copy_later if self.async_staging else self._stager.copy)(state_dict)

    def close(self) -> None:
        """Free the memory of earlier copies; the writer may be used again."""
        self._stager.clear()

    # ---- the steps of a save, in the order of torch's calls --------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a save.

        Args:
            checkpoint_id: name of the checkpoint within the run, such as its step.

        Raises:
            UsageError: the id has a colon, ``@``, ``/`` or space in it, or a save is in progress.
        """
        if self._is_saving():
            raise UsageError(
                f"save checkpoint {checkpoint_id!r} of {self.name!r}: checkpoint {self._step!r} is "
                f"still being saved; wait for the result of its async_save first"
            )
        self._step = check_id(checkpoint_id)
        self._save_id = str(uuid4())
        self._saver = threading.current_thread()

    def _is_saving(self) -> bool:
        """Return True if another thread is between ``reset`` and the end of its save.

        torch does not report a failed save to the writer. Each ``async_save`` has a thread, which
        ends with it. A failed save of the main thread, or of this one, has ended.
        """
        saver = self._saver
        if saver in (None, threading.current_thread(), threading.main_thread()):
            return self._saving
        saver.join(END_TIMEOUT_S)
        return saver.is_alive()

    def set_up_storage_writer(self, _is_coordinator: bool, **kwargs: Any) -> None:
        """Check that this save is one that the writer supports.

        Raises:
            UsageError: there is no ``checkpoint_id``, or ``use_collectives`` is False.
        """
        if not kwargs.get("use_collectives", True):
            raise UsageError("save a checkpoint: expected use_collectives=True, got False")
        self._current_step()

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Free the space of saves that were killed; return the plans as they are."""
        with self._open() as volume:
            remove_unused(volume, self.name, timeout_s=REMOVAL_TIMEOUT_S)
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the shards of this rank, without those that the last checkpoint has.

        Returns:
            A completed future with a ``WriteResult`` for each item of the plan.

        Raises:
            DlfsError: as ``ShardWriter.write``.
        """
        self._saving = True
        try:
            with self._open() as volume:
                self._written_step = self._current_step()
                writer = ShardWriter(
                    volume,
                    shards_dataset(self.name, self._written_step),
                    self._known_pieces(volume),
                    timeout_s=self.lock_timeout_s,
                )
                found = writer.write(self._item(item, planner) for item in plan.items)
        finally:
            self._saving = False
        done: Any = Future()
        done.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=sum(piece.length_bytes for piece in found[item.index]),
                    storage_data=found[item.index],
                )
                for item in plan.items
            ]
        )
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Commit the checkpoint; then remove those that ``keep`` does not allow.

        Raises:
            UsageError: another save of this writer began after ``write_data``.
            DlfsError: as ``commit``; or a removal failed after the commit.
        """
        step = self._current_step()
        if self._saving or step != self._written_step:
            raise UsageError(
                f"save checkpoint {self._written_step!r} of {self.name!r}: the save of checkpoint "
                f"{step!r} began before its end; wait for the result of each async_save"
            )
        self._saving = True
        try:
            self._commit(step, metadata, results)
            self._step = self._saver = None
        finally:
            self._saving = False

    def _commit(self, step: str, metadata: Any, results: list[list[Any]]) -> None:
        """Commit the checkpoint and remove the outdated ones."""
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        with self._open() as volume:
            commit(volume, self.name, step, metadata, timeout_s=self.lock_timeout_s)
            if self.keep is not None:
                remove_outdated(volume, self.name, self.keep, timeout_s=REMOVAL_TIMEOUT_S)

    # ---- descriptions ----------------------------------------------------------------------------

    def storage_meta(self) -> Any:
        """Return the ids of the checkpoint and of this save."""
        return StorageMeta(checkpoint_id=self._step, save_id=self._save_id)

    # ---- private ---------------------------------------------------------------------------------

    def _open(self) -> dlfs.Volume:
        return open_volume(self.volume)

    def _current_step(self) -> str:
        if self._step is None:
            raise UsageError(
                f"save a checkpoint of {self.name!r}: expected a checkpoint_id, such as the step"
            )
        return self._step

    def _known_pieces(self, volume: dlfs.Volume) -> dict[Any, tuple[Piece, ...]]:
        """Return the pieces of each item of the last checkpoint; none if it cannot be read."""
        last = find_last_metadata(volume, self.name)
        if last is None:
            return {}
        try:
            return read_metadata(volume, last).storage_data  # type: ignore[no-any-return]
        except DlfsError as error:
            _log.warning("nothing is shared with %s, which cannot be read: %s", last, error)
            return {}

    def _item(self, item: Any, planner: Any) -> Item:
        """Return an item of a plan for the ``ShardWriter``."""

        def load() -> Any:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                self._check_object(item.index.fqn, data)
                return np.frombuffer(data.getbuffer(), np.uint8)
            return tensor_bytes(data)

        return Item(item.index, load)

    def _check_object(self, name: str, content: io.BytesIO) -> None:
        """Warn of an object that a load would refuse; at the first save that has it."""
        if name in self._checked:
            return
        self._checked.add(name)
        try:
            load_restricted(io.BytesIO(content.getbuffer()))
        except FormatError as error:
            _log.warning(
                "%s is saved, but can be loaded only by StorageReader(..., weights_only=False), or "
                "with its classes in torch.serialization.add_safe_globals: %s",
                quote(name),
                error,
            )
