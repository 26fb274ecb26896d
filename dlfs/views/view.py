"""``DatasetView``: reads several datasets, or some of their samples, as one dataset.

Threads: any at once. A view is immutable and picklable; its datasets belong to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.base.arguments import OnError
from dlfs.base.forks import cached_property
from dlfs.base.units import format_count
from dlfs.dataset.dataset import Dataset
from dlfs.directory import check_indices, check_position
from dlfs.epoch.options import EpochKeywords, EpochOptions, make_options
from dlfs.epoch.selection import Selection, select
from dlfs.errors import UsageError
from dlfs.format.digests import Digests
from dlfs.reader import Batch, Epoch, follow, pick_fields
from dlfs.views.order import Division, Interleaving, Succession, ViewOrder
from dlfs.views.reading import ViewReader
from dlfs.views.sources import Sources, ViewColumns


class DatasetView:
    """Samples of one or several datasets, read as one dataset.

    ``concat``, ``mix``, ``select`` and ``split`` make views. The samples are numbered 0..N-1, one
    source after the other. Loaders and samplers take a view in place of a dataset.

    Args:
        sources: the datasets, and the samples chosen of each.
        name: name of the view, for messages.
        weights: integer weight of each source, >= 1; None to take every sample once in an epoch.
        epoch_samples: samples of an epoch, if there are weights.
        seed: seed of the mix, which is combined with the seed of an epoch.

    Attributes:
        name: name of the view.
        digests: digests made of those of the datasets, the chosen samples and the weights.
        epoch_samples: samples of an epoch.

    Threads: any at once.
    """

    def __init__(
        self,
        sources: Sources,
        name: str,
        *,
        weights: Sequence[int] | None = None,
        epoch_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        self.sources = sources
        self.name = name
        self.weights = None if weights is None else tuple(weights)
        self.epoch_samples = len(sources) if epoch_samples is None else epoch_samples
        self._seed = seed
        prints = [source.fingerprint for source in sources.sources]
        described = f"view {prints} {self.weights} {self.epoch_samples} {seed}"
        each = [source.dataset.digests for source in sources.sources]
        self.digests: Digests = Digests.combine(each, described)

    def with_sources(self, sources: Sources, name: str, epoch_samples: int) -> DatasetView:
        """Return a mix of other samples with the same weights and seed."""
        return DatasetView(
            sources, name, weights=self.weights, epoch_samples=epoch_samples, seed=self._seed
        )

    def __repr__(self) -> str:
        count = format_count(len(self), "sample")
        epoch = "" if self.weights is None else f", {self.epoch_samples} in an epoch"
        datasets = format_count(len(self.sources.sources), "dataset")
        return f"<DatasetView {self.name!r}: {count} of {datasets}{epoch}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: datasets, thumbnails of some samples, columns."""
        from dlfs.notebook import show_view

        return show_view(self, lambda: self._columns)

    def __len__(self) -> int:
        return len(self.sources)

    # ---- samples ---------------------------------------------------------------------------------

    def read(
        self,
        indices: ArrayLike,
        *,
        on_error: OnError = "raise",
        fields: Sequence[str] | None = None,
    ) -> Batch:
        """Read samples as one batch, in the order of the indices.

        Args:
            indices: the view's indices 0..N-1, one dimension.
            on_error: policy for samples that cannot be read: ``raise`` or ``skip``; ``replace``
                only if no samples of a dataset were chosen.
            fields: names of the fields that the batch has and that are read; by default all.

        Raises:
            UsageError: an index is out of range, the policy does not fit, or there is no such
                field.
            DlfsError: as ``Dataset.read``.
        """
        self._check_policy(on_error)
        chosen = self._check(indices)
        batch: Batch = follow(
            lambda: self.open_reader(fields), lambda reader: reader.read(chosen, on_error)
        )
        return batch.with_fields(fields)

    def __getitem__(self, index: int) -> bytes:
        """Read one sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer.
            DlfsError: as ``Dataset.read``.
        """
        dataset, inner = self._locate(index)
        return dataset[inner]

    def path(self, index: int) -> bytes:
        """Return the path of a sample in its dataset; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer.
        """
        dataset, inner = self._locate(index)
        return dataset.path(inner)

    def paths_of(self, indices: ArrayLike) -> list[bytes]:
        """Return the paths of samples in their datasets, by the view's indices in any order.

        Raises:
            UsageError: an index is out of range.
        """
        found: list[bytes] = self.sources.gather(
            self._check(indices), Dataset.paths_of, object
        ).tolist()
        return found

    def lengths(self, indices: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the lengths of some or all samples in bytes, ``int64[n_samples]``.

        Raises:
            UsageError: an index is out of range.
        """
        return self.sources.gather(self._check(indices), Dataset.lengths, np.int64)

    @property
    def fields(self) -> dict[str, str]:
        """Type of each field by name, if all datasets have the same ones; else empty.

        Raises:
            FormatError: the columns of a dataset's fields are malformed.
            DlfsError: they cannot be read.
        """
        each = [source.dataset.fields for source in self.sources.sources]
        same = all(list(fields.items()) == list(each[0].items()) for fields in each)
        return each[0] if same else {}

    def sample(self, index: int) -> dict[str, Any]:
        """Read the fields of one sample; as ``Dataset.sample``.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer, or the samples have no fields.
            DlfsError: as ``Dataset.sample``.
        """
        dataset, inner = self._locate(index)
        return dataset.sample(inner)

    def field_lengths(self, name: str, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the length of a field of some samples in bytes; as ``Dataset.field_lengths``."""
        return self.sources.gather(
            self._check(indices),
            lambda dataset, inner: dataset.field_lengths(name, inner),
            np.int64,
        )

    @property
    def columns(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each column that all datasets have, by name."""
        return dict(self._columns.dtypes)

    def column(self, name: str, indices: ArrayLike | None = None) -> NDArray[Any]:
        """Return a column of attributes: one value for each sample.

        Args:
            name: name of a column that all datasets have.
            indices: the view's indices of the samples; by default all.

        Returns:
            ``dtype[n]``; strings are an ``object`` array of ``str``.

        Raises:
            NotFoundError: a dataset has no such column.
            UsageError: an index is out of range.
            DlfsError: as ``Dataset.column``.
        """
        return self._columns.column(name, self._check(indices))

    @cached_property
    def _columns(self) -> ViewColumns:
        return ViewColumns(self.sources, self.name)

    def _check(self, indices: ArrayLike | None) -> NDArray[np.uint64]:
        """Return indices that are all in range, ``uint64[n]``; None means all samples."""
        if indices is None:
            return np.arange(len(self), dtype=np.uint64)
        action = f"read samples of {self.name}"
        return check_indices(indices, len(self), option="indices", action=action)

    def _locate(self, index: object) -> tuple[Dataset, int]:
        """Return the dataset of a sample, and its index there; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer.
        """
        position = check_position(index, len(self), where=self.name)
        part = next(self.sources.split(np.array([position], np.uint64)))
        return self.sources.sources[part.source].dataset, int(part.indices[0])

    # ---- epochs ----------------------------------------------------------------------------------

    def batches(self, batch_size: int, **options: Unpack[EpochKeywords]) -> Epoch:
        """Return one rank's batches of one epoch, which are read ahead.

        Args:
            batch_size: samples of this rank in a batch.
            options: as ``Dataset.batches`` takes them. ``shuffle`` is applied to each dataset, and
                datasets alternate at random unless ``concat`` is read with ``shuffle=None``. A view
                takes no ``weights`` and ``draws``, and a mix no ``where``.

        Raises:
            UsageError: an argument is out of range.
        """
        return self.start_epoch(
            make_options(DatasetView.batches, EpochKeywords, options, batch_size=batch_size)
        )

    def start_epoch(self, options: EpochOptions) -> Epoch:
        """Return the batches of an epoch, as ``batches``; for callers that keep the options.

        Raises:
            UsageError: the options do not fit the view.
        """
        self._check_policy(options.on_error)
        if options.fields is not None:
            pick_fields(self.fields, options.fields, self.name)
        return Epoch(
            lambda: self.open_reader(options.fields),
            options,
            dataset=self.name,
            digests=self.digests,
            sample_count=self.epoch_samples,
            selection=self._select(options),
        )

    def order_epoch(self, options: EpochOptions) -> ViewOrder:
        """Return the order of an epoch: the view's index at each position.

        Raises:
            UsageError: the options do not fit the view.
        """
        return self._make_order(options, self._select(options))

    def order(self) -> NDArray[np.uint64]:
        """Return the indices of all samples, dataset by dataset, in storage order."""
        options = EpochOptions(shuffle=None)
        return ViewOrder(
            self.sources,
            Succession(self.sources.sizes),
            len(self),
            key=self._seed,
            options=options,
        ).indices()

    def _make_order(self, options: EpochOptions, selection: Selection | None) -> ViewOrder:
        return ViewOrder(
            self.sources,
            self._divide(options),
            self.epoch_samples,
            key=self._seed,
            options=options,
            selection=selection,
        )

    def _divide(self, options: EpochOptions) -> Division:
        if self.weights is None and options.shuffle is None:
            return Succession(self.sources.sizes)
        return Interleaving(self.weights or self.sources.sizes)

    def _select(self, options: EpochOptions) -> Selection | None:
        if options.weights is not None or options.draws is not None:
            raise UsageError(
                f"order an epoch of {self.name}: expected no weights of samples; mix() takes "
                "weights of datasets"
            )
        if options.where is not None and self.weights is not None:
            raise UsageError(
                f"order an epoch of {self.name}: expected no where, got one for a mix; "
                "dlfs.select(mix, where) is a mix of the chosen samples"
            )
        return select(self, self.column, options)

    def _check_policy(self, on_error: OnError) -> None:
        if on_error == "replace" and any(s.chosen is not None for s in self.sources.sources):
            raise UsageError(
                f"read samples of {self.name}: expected on_error 'raise' or 'skip', got 'replace', "
                "which could read samples that the view leaves out"
            )

    def open_reader(self, fields: Sequence[str] | None = None) -> ViewReader:
        """Return a reader for this process, for epochs that compute their own batches.

        Args:
            fields: names of the fields to read; None for whole samples.
        """
        common = fields if fields is not None and self.fields else None
        return ViewReader(self.sources, self._make_order, self._columns, self.name, common)

    def close(self) -> None:
        """Close the datasets. Batches given out stay valid. Idempotent."""
        for source in self.sources.sources:
            source.dataset.close()
