"""``ImportingLoader``: trains on the samples of an import while they arrive on the volume.

The import runs beside rank 0 (``import_process``) and commits steps. All ranks read the steps back
from the volume (``dlfs.ArrivingDataset``), and share them out as in every other epoch. When the
import has ended, the first epoch ends with the last sample, and an ordinary ``Loader`` of the new
dataset gives all later ones.

docs/pytorch.md says what order the first epoch has.

Threads: one at a time; see ``import_process`` for those beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dlfs import Dataset, Volume
from dlfs import open as open_volume
from dlfs.adapters.torch.arriving import UNKNOWN, ArrivingLoader
from dlfs.adapters.torch.forms import ElementType
from dlfs.adapters.torch.import_process import ImportProcess
from dlfs.adapters.torch.labels import ColumnLabels
from dlfs.adapters.torch.lightning_fit import EpochSetter
from dlfs.adapters.torch.loader import Loader
from dlfs.adapters.torch.placement import PlacementFinder, refuse_second_sharding
from dlfs.adapters.torch.samples import Collate, Transform
from dlfs.adapters.torch.shares import Uneven, check_uneven
from dlfs.adapters.torch.states import State, plain_state
from dlfs.base.arguments import check_integer, check_keywords
from dlfs.base.units import MIB
from dlfs.base.wording import quote, show_value
from dlfs.dataset.arriving_epoch import STATE_PREFIX
from dlfs.epoch.options import EpochOptions, ReadKeywords
from dlfs.epoch.ranks import process_group
from dlfs.errors import DlfsError, StaleError, UsageError
from dlfs.store.members import Members, split_uris

WINDOW_BYTES = 128 * MIB
"""Size of a window of the first epoch by default, and bytes of samples of a step of the import."""

_REFUSED = (
    "--append",
    "--skip-existing",
    "--name",
    "--step",
    "--one-pass",
    "--resume",
    "--abandon",
)
"""Options of ``dlfs import`` that do not fit, or are the loader's."""

_REFUSED_WITH_WORKERS = ("--workers", "--join-file")
"""Further ones if the ranks import."""

_numbers = count()
"""Numbers of the imports that this process has begun, which are the same on all ranks."""


class LoaderKeywords(ReadKeywords, total=False):
    """Keywords of ``Loader``, which describes them."""

    uneven: Uneven | None
    fields: Sequence[str] | None
    transform: Transform | None
    with_context: bool
    collate: Collate
    dtype: ElementType | None
    shape: tuple[int, ...] | None
    arrays: bool
    threads: int
    lookahead: int
    num_workers: int
    multiprocessing_context: Any
    device: str | int | torch.device | None
    pin_memory: bool
    as_pairs: bool


class ImportingLoader(IterableDataset[Any]):
    """A ``Loader`` of a dataset that is imported while the first epoch runs.

    The first iteration begins the import, unless the volume has a dataset of this name, or goes on
    with an unfinished one. The first epoch (0) takes the samples in windows of the order in which
    they are packed; it waits for those that have not arrived. All later epochs are those of a
    ``Loader`` of the new dataset. States, ``set_epoch`` and iterations are as a ``Loader`` has
    them. A state of the first epoch continues at any number of ranks, also after the import has
    ended.

    ``len`` is known when the import has ended; before, it raises ``TypeError``. In the first epoch
    the indices of batches, and of ``SampleContext``, are the numbers of the samples in the order in
    which they are packed; later they are those of the dataset.

    Args:
        source: path or URL of what to import, or several, as ``dlfs import`` takes them.
        volume: volume to import to, which each rank opens: by its devices, or through a service.
        name: name of the new dataset.
        batch_size: samples of this rank in a batch, >= 1.
        import_options: further options of ``dlfs import``, such as ``["--format", "imagefolder",
            "--skip-bad", "0.1%"]``.
        import_workers: processes of each rank that read and write parts of the source, as ``dlfs
            import --workers``; 0: rank 0 imports by itself, in one process unless
            ``import_options`` says otherwise.
        import_to: the volume as rank 0 opens it for the import, as ``dlfs.open`` takes it; needed
            if ``volume`` was opened through a service, which only reads.
        window_bytes: bytes of samples that are shuffled among each other in the first epoch, and
            that the import commits at a time. The first batch comes when the first window is there.
        labels: name of a column of labels; in the first epoch, of numbers.
        options: as ``Loader`` takes them, without ``where``, ``weights``, ``draws`` and ``order``.

    Raises:
        UsageError: an argument is out of range, or ``import_to`` is missing.

    Threads: one at a time.
    """

    is_resumed = False
    """True if Lightning has loaded a state and has not begun to train yet."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        volume: Volume,
        name: str,
        batch_size: int,
        *,
        import_options: Sequence[str] = (),
        import_workers: int = 0,
        import_to: Members | None = None,
        window_bytes: int = WINDOW_BYTES,
        labels: str | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> None:
        check_keywords(ImportingLoader, LoaderKeywords, options)
        check = partial(check_integer, action="make a loader")
        self.batch_size = check(batch_size, 1, option="batch_size")
        self._window_bytes = check(window_bytes, 1, option="window_bytes")
        self._import_workers = check(import_workers, 0, option="import_workers")
        self._volume, self.name, self._labels = volume, name, labels
        self._options: dict[str, Any] = dict(options)
        check_uneven(options.get("uneven"))
        self._finder = PlacementFinder(
            options.get("rank"), options.get("world_size"), options.get("placement")
        )
        self._import_to = _find_target(volume, import_to)
        self._arriving = volume.arriving(name)
        window_chunks = max(1, window_bytes // volume.chunk_bytes)
        step_bytes = window_chunks * volume.chunk_bytes
        own = [] if not import_workers else ["--workers", str(self._import_workers)]
        given = ["--name", name, "--step", str(step_bytes), "--one-pass", "--json", *own]
        refused = _REFUSED + (_REFUSED_WITH_WORKERS if own else ())
        self._command = _make_command(source, self._import_to, given, import_options, refused)
        read = {k: v for k, v in self._options.items() if k in ReadKeywords.__annotations__}
        self._order = EpochOptions(**{**read, "window_chunks": window_chunks})
        self._arriving.start_epoch(self._order).close()  # raises if an option does not fit
        self._running: ImportProcess | None = None
        self._first: ArrivingLoader | None = None
        self._later: Loader | None = None
        self._dataset: Dataset | None = None
        self._present: Loader | None = None
        """The loader of the present epoch; None before the first iteration."""
        self._wanted: tuple[int, State | None] | None = (0, None)
        """Epoch to go to, and the state to continue at; None if the present loader has it."""

    def __repr__(self) -> str:
        dataset = f"dataset {self.name!r} on {self._volume.uri}"
        return f"<ImportingLoader of {dataset}: epoch {self.epoch}, position {self.position}>"

    # ---- state -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process among those that take different samples; see ``Loader``."""
        return self._finder.current().rank

    @property
    def world_size(self) -> int:
        """Number of ranks that take different samples; see ``Loader``."""
        return self._finder.current().world_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        if self._wanted is not None:
            return self._wanted[0]
        assert self._present is not None
        return self._present.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have been given."""
        if self._wanted is not None:
            state = self._wanted[1]
            return 0 if state is None else int(state["position"])
        assert self._present is not None
        return self._present.position

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch.

        Raises:
            TypeError: the import has not ended, so that it is unknown.
        """
        self._arriving.look()
        if self._arriving.total is None:
            raise TypeError(
                f"count the batches of {quote(self.name)}: their number is unknown until the "
                "import has ended"
            )
        return len(self._open_later())

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; no effect if it is the current epoch already.

        Raises:
            UsageError: it is negative, or Accelerate calls; see ``Loader``.
        """
        refuse_second_sharding(self._finder, "a loader")
        if epoch < 0:
            raise UsageError(f"set the epoch: expected 0 or more, got {epoch}")
        if epoch != self.epoch:
            self._leave((epoch, None))

    @property
    def batch_sampler(self) -> EpochSetter:
        """Object on whose ``sampler`` Lightning calls ``set_epoch`` with the epoch that begins."""
        return EpochSetter(self, self._finder)

    def state_dict(self) -> State:
        """Return the state behind the last batch that was given: plain values, for a checkpoint.

        From the second epoch on it is the state of a ``Loader`` of the dataset, which takes it.
        """
        if self._wanted is not None:
            epoch, state = self._wanted
            if state is not None:
                return dict(state)
            if epoch == 0:
                with self._arriving.start_epoch(self._order) as begin:
                    return begin.state()
            return self._open().state_dict()
        assert self._present is not None
        state = self._present.state_dict()
        if self._present is self._first and state["epoch"] > 0:
            return self._open().state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue at a checkpoint, in its order, at any world size and number of workers.

        Args:
            state: value of ``state_dict``, or ``TensorBatch.state``.

        Raises:
            UsageError: it is no such state, or of another import or dataset.
        """
        plain = plain_state(state, UNKNOWN)
        if plain["dataset"].startswith(STATE_PREFIX):
            self._arriving.look()
            with self._arriving.start_epoch(self._order) as epoch:
                epoch.resume(plain)  # raises if the state does not fit
            self._leave((plain["epoch"], None if plain["epoch"] else plain))
        else:
            self._leave((plain["epoch"], dict(state)))
            self._arriving.look()
            if self._arriving.total is not None:
                self._go_to_wanted()  # raises if the state does not fit

    def _leave(self, wanted: tuple[int, State | None]) -> None:
        """End the iteration in progress; the next one begins elsewhere."""
        if self._present is not None:
            self._present.close()
        self._wanted = wanted

    # ---- iterations ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, by ``TensorBatch``, or as ``as_pairs`` says.

        In the first epoch this waits for samples that have not arrived.

        Raises:
            DlfsError: the import has failed, with its error; or as for ``Loader``.
            StaleError: the import was abandoned.
            UsageError: a worker of a ``DataLoader`` calls; or as for ``Loader``.
        """
        if get_worker_info() is not None:
            raise UsageError(
                "iterate over an ImportingLoader: expected the training process, got a worker of a "
                "DataLoader; it reads with workers of its own if it is made with num_workers"
            )
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        loader = self._open()
        try:
            yield from loader
        except DlfsError:
            if loader is self._first and self._running is not None:
                self._running.check()  # which may be the cause, as workers cannot say
            raise

    def _open(self) -> Loader:
        """Return the loader of the present epoch; begin the import, if that has not been done."""
        self._begin_import()
        first = self._first
        if self._wanted is None and first is self._present and first is not None and first.epoch:
            self._wanted = first.epoch, None
        if self._wanted is not None:
            self._go_to_wanted()
        assert self._present is not None
        return self._present

    def _go_to_wanted(self) -> None:
        assert self._wanted is not None
        epoch, state = self._wanted
        loader: Loader
        if epoch == 0 and (state is None or state["dataset"].startswith(STATE_PREFIX)):
            loader = first = self._open_first()
            first.go_to(state)
        else:
            loader = self._open_later()
            if state is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(state)
        self._present, self._wanted = loader, None

    def _open_first(self) -> ArrivingLoader:
        """Return the loader of the first epoch, when the first step has arrived."""
        if self._first is None:
            assert self._running is not None
            self._wait(0)
            self._first = ArrivingLoader(
                self._arriving,
                self.batch_size,
                window_bytes=self._window_bytes,
                running=self._running,
                labels=self._labels,
                **self._options,
            )
        return self._first

    def _open_later(self) -> Loader:
        """Return the loader of later epochs, when the import has ended."""
        if self._later is None:
            self._wait(UNKNOWN)
            self._volume.refresh()
            versions = self._volume.versions(self.name)
            found = [info.version for info in versions if info.uuid == self._arriving.uuid]
            if not found:
                raise StaleError(f"read the dataset {quote(self.name)}: it was removed")
            dataset = self._dataset = self._volume.dataset(self.name, found[0])
            labels = None if self._labels is None else ColumnLabels(dataset, self._labels)
            self._later = Loader(dataset, self.batch_size, labels=labels, **self._options)
        return self._later

    def _wait(self, samples: int) -> None:
        check = (lambda: None) if self._running is None else self._running.check
        self._arriving.wait(samples, self._window_bytes, check=check, timeout_s=None)

    def _begin_import(self) -> None:
        """Begin the import, or go on with one that has failed."""
        if self._running is not None and self._running.failure is None:
            return
        ranks = _Ranks.find(self._finder)
        command: Sequence[str] | None = None
        refusal: DlfsError | None = None
        if ranks.is_first:
            try:
                command = self._command if self._is_needed() else ()
            except DlfsError as error:
                command, refusal = (), error
        key, workers = f"dlfs/import/{next(_numbers)}", self._import_workers
        running = ImportProcess(
            self.name, command, ranks.store, key, workers=workers, refusal=refusal
        )
        self._running = running
        if self._first is not None:
            self._first.running = running
        running.share()

    def _is_needed(self) -> bool:
        """Return True unless the volume has the dataset, and no unfinished import of it.

        Raises:
            UsageError: ``import_to`` is another volume.
        """
        self._volume.refresh()
        is_unfinished = any(info.name == self.name for info in self._volume.unfinished())
        if not is_unfinished and self.name in self._volume:
            return False
        if self._import_to != self._volume.uri:
            with open_volume(self._import_to) as target:
                got = target.uuid
            if got != self._volume.uuid:
                raise UsageError(
                    f"import {quote(self.name)} while training: expected import_to to be volume "
                    f"{self._volume.uuid}, which {self._volume.uri} reads, got {got}"
                )
        return True

    def close(self) -> None:
        """End the import, which can go on later, and close what was opened. Idempotent."""
        for opened in (self._first, self._later, self._running, self._arriving, self._dataset):
            if opened is not None:
                opened.close()


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The training processes among which one runs the import.

    Attributes:
        is_first: True in the process that runs it.
        store: store that they share; None if there is one.
    """

    is_first: bool
    store: Any

    @classmethod
    def find(cls, finder: PlacementFinder) -> _Ranks:
        """Find the ranks of torch.distributed.

        Raises:
            UsageError: there are several ranks without it.
        """
        if process_group() is not None:
            is_alone = dist.get_world_size() == 1
            store = None if is_alone else dist.distributed_c10d._get_default_store()
            return cls(dist.get_rank() == 0, store)
        world_size = finder.current().world_size
        if world_size > 1:
            raise UsageError(
                "import while training: expected torch.distributed to be initialised, by which "
                f"ranks learn how the import goes, got {world_size} ranks without it"
            )
        return cls(True, None)


def _find_target(volume: Volume, import_to: Members | None) -> str:
    """Return the URIs of the volume, separated by commas, as the import opens it.

    Raises:
        UsageError: it was opened through a service, and they are not given.
    """
    if import_to is not None:
        return ",".join(split_uris(import_to))
    if volume.uri.startswith("unix:"):
        members = ",".join(member.uri for member in volume.members)
        raise UsageError(
            f"import while training through {volume.uri}: expected import_to, the volume as rank 0 "
            f"opens it for the import, because a service only reads; its own is {members}"
        )
    return volume.uri


def _make_command(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    import_to: str,
    given: Sequence[str],
    options: Sequence[str],
    refused: Sequence[str],
) -> list[str]:
    """Return the arguments of the ``dlfs`` that imports.

    Raises:
        UsageError: an option does not fit.
    """
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    texts = [os.fspath(each) for each in sources]
    if isinstance(options, str) or any(not isinstance(each, str) for each in options):
        raise UsageError(
            "import while training: expected import_options as a list of the words of a command, "
            f"got {show_value(options)}"
        )
    for option in options:
        if option.partition("=")[0] in refused:
            raise UsageError(
                f"import while training: expected options of 'dlfs import' without {option}, which "
                "does not fit, or which the loader gives itself"
            )
    if "-" in texts:
        raise UsageError(
            "import while training: expected a path or URL, got '-': standard input cannot be read "
            "again after a kill"
        )
    return ["import", *given, *options, "--", *texts, import_to]
