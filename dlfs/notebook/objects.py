"""Composes the pages of volumes, datasets, views, batches and epochs.

Each section of a page is made by a function of its own, and shows its error if that raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dlfs.base.units import MIB, format_bytes, format_count
from dlfs.base.wording import dtype_name
from dlfs.errors import DlfsError
from dlfs.notebook.markup import (
    BLUE,
    CELL_CHARACTERS_MAX,
    GREY,
    ORANGE,
    TITLE_CHARACTERS_MAX,
    Html,
    bar,
    fragment,
    line,
    note,
    page,
    readable,
    table,
)
from dlfs.notebook.thumbnails import THUMBNAILS_MAX, Thumbnails, row_of

ROWS_MAX = 20
"""Most rows of a table of members, datasets or columns."""
COLUMNS_MAX = 8
"""Most columns of attributes in a table of samples."""
LISTED_CHARACTERS_MAX = 24
"""Most characters of a value in a list of values."""
FAILURES_MAX = 5
"""Most failed samples that are listed."""
SAMPLES_BYTES_MAX = 32 * MIB
"""Most bytes of samples that a page reads."""
COLUMN_BYTES_MAX = 64 * MIB
"""Size of a column above which its values are not loaded for a page."""
RESERVED = "dlfs:"
"""Beginning of the names of columns that describe how samples are stored."""


OpenColumns = Callable[[], Any]
"""Returns the columns of a dataset or a view; raises if they cannot be read."""


# ---- volumes -------------------------------------------------------------------------------------


def show_volume(volume: Any) -> str:
    """Return the page of a ``Volume``: used space, members and datasets."""

    def space() -> Html:
        total, free = volume.capacity_bytes, volume.free_bytes
        text = f"{format_bytes(total - free)} of {format_bytes(total)} used"
        return fragment(
            bar(((total - free) / total if total else 0.0, BLUE, text)),
            line(f"{text}, generation {volume.generation}"),
        )

    def datasets() -> Html:
        found = volume.datasets()
        rows = [
            (
                readable(f"{info.name}@{info.version}"),
                f"{info.sample_count:,}",
                format_bytes(info.sample_bytes),
                format_bytes(info.attribute_bytes) if info.attribute_bytes else "",
                f"{info.created:%Y-%m-%d %H:%M} UTC",
            )
            for info in found[-ROWS_MAX:]
        ]
        titles = ("dataset", "samples", "size", "attributes", "created")
        made = table(titles, rows, right=titles[1:4]) if rows else note("no datasets")
        return fragment(made, _more(len(found), "dataset"))

    def members() -> Html:
        found = volume.members
        rows = [
            (
                str(member.number),
                readable(member.uri),
                format_bytes(member.size_bytes),
                readable(f"{member.state}: {member.reason}" if member.reason else member.state),
            )
            for member in found[:ROWS_MAX]
        ]
        titles = ("member", "device", "size", "state")
        return fragment(table(titles, rows, right=("size",)), _more(len(found), "member"))

    return page(lambda: repr(volume), space, datasets, members)


def _more(count: int, noun: str, shown: int = ROWS_MAX) -> Html:
    """Return a note on the things that a table leaves out; nothing if it has all."""
    if count <= shown:
        return Html()
    return note(f"and {format_count(count - shown, f'other {noun}')}")


# ---- datasets and views --------------------------------------------------------------------------


def show_dataset(dataset: Any, columns: OpenColumns) -> str:
    """Return the page of a ``Dataset``: its fields, thumbnails of some samples, its columns.

    Args:
        dataset: the dataset.
        columns: returns its ``AttributeTable``.
    """

    def facts() -> Html:
        info = dataset.info
        return line(
            f"created {info.created:%Y-%m-%d %H:%M} UTC, packed in "
            f"{'path' if info.layout == 'path' else 'shuffled'} order, "
            f"{format_bytes(info.stored_bytes)} on the volume"
        )

    def fields() -> Html:
        types = [readable(f"{name} {kind}") for name, kind in dataset.fields.items()]
        shown = ", ".join(types[:ROWS_MAX])
        more = _more(len(types), "field")
        return fragment(line(f"fields: {shown}"), more) if types else Html()

    return page(
        lambda: repr(dataset),
        facts,
        fields,
        lambda: _thumbnails(dataset, _choose([len(dataset)])),
        lambda: _column_table(columns, _choose([len(dataset)])),
    )


def show_view(view: Any, columns: OpenColumns) -> str:
    """Return the page of a ``DatasetView``: its datasets, thumbnails of some samples, columns.

    Args:
        view: the view.
        columns: returns the columns that all of its datasets have.
    """

    def sources() -> Html:
        found = view.sources.sources
        total = sum(view.weights or ()) or 1
        shares = [f"{weight / total:.1%}" for weight in view.weights or ()] or [""] * len(found)
        rows = [
            (
                readable(f"{source.dataset.name}@{source.dataset.version}"),
                f"{len(source):,}",
                "all" if source.chosen is None else "chosen",
                share,
            )
            for source, share in islice(zip(found, shares, strict=True), ROWS_MAX)
        ]
        titles = ("dataset", "samples", "of it", "share of an epoch")
        made = table(titles, rows, right=("samples", "share of an epoch"))
        return fragment(made, _more(len(found), "dataset"))

    return page(
        lambda: repr(view),
        sources,
        lambda: _thumbnails(view, _choose(view.sources.sizes)),
        lambda: _column_table(columns, _choose(view.sources.sizes)),
    )


def _choose(sizes: Sequence[int]) -> list[int]:
    """Return the indices of the samples to show, evenly spaced over each dataset.

    Args:
        sizes: number of samples of each dataset, whose indices follow one another.
    """
    chosen: list[int] = []
    starts = accumulate(sizes, initial=0)
    sized = [(start, size) for start, size in zip(starts, sizes, strict=False) if size]
    for place, (start, size) in enumerate(sized[:THUMBNAILS_MAX]):
        left = min(len(sized), THUMBNAILS_MAX) - place
        shown = min(size, (THUMBNAILS_MAX - len(chosen)) // left)
        chosen += [start + number * size // shown for number in range(shown)]
    return chosen


def _thumbnails(samples: Any, indices: Sequence[int]) -> Html:
    """Read some samples and return their thumbnails."""
    if not indices:
        return note("no samples")
    lengths = samples.lengths(indices).tolist()
    share = SAMPLES_BYTES_MAX // len(indices)
    small = [index for index, length in zip(indices, lengths, strict=True) if length <= share]
    read: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    if small:
        with samples.read(small, on_error="skip") as batch:
            values = _values(batch, len(batch))
            reasons = {small[failure.position]: failure.reason for failure in batch.failures}
            read = dict(zip(batch.indices.tolist(), values, strict=True))
    made = Thumbnails(len(indices))
    cards = []
    for index, length in zip(indices, lengths, strict=True):
        path = samples.path(index)
        name = readable(path.rsplit(b"/", 1)[-1])
        title = f"{index}: {readable(path, TITLE_CHARACTERS_MAX)}, {format_bytes(length)}"
        if index in read:
            cards.append(made.card(read[index], name, title))
        else:
            text = readable(reasons.get(index, f"{format_bytes(length)}: too large to show"))
            cards.append(made.message(text, name, title))
    return row_of(cards)


def _values(batch: Any, count: int) -> Sequence[Any]:
    """Return the first samples of a batch: as fields by name, as arrays or as bytes."""
    if batch.fields:
        return [batch.sample(position) for position in range(count)]
    try:
        arrays: list[Any] = batch.arrays(stack=False)[:count]
    except DlfsError:  # no arrays
        return [batch[position] for position in range(count)]
    return arrays


def _column_table(columns: OpenColumns, indices: Sequence[int]) -> Html:
    """Return a table of columns: name, type and the values of some samples."""
    known = columns()
    dtypes = _visible(known.dtypes)
    rows = [
        (
            readable(name),
            "text" if dtype == np.dtype(object) else dtype_name(dtype),
            _join(known, name, indices),
        )
        for name, dtype in islice(dtypes.items(), ROWS_MAX)
    ]
    if not rows:
        return Html()
    titles = ("column", "type", "values of these samples")
    return fragment(table(titles, rows), _more(len(dtypes), "column"))


def _visible(dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, np.dtype[Any]]:
    return {name: dtype for name, dtype in dtypes.items() if not name.startswith(RESERVED)}


def _cells(
    columns: Any, name: str, indices: ArrayLike, characters: int = CELL_CHARACTERS_MAX
) -> list[str] | None:
    """Return some values of a column as text; None if the column is too large to load."""
    if columns.column_bytes(name) > COLUMN_BYTES_MAX:
        return None
    return [readable(value, characters) for value in columns.column(name, indices)]


def _join(columns: Any, name: str, indices: ArrayLike) -> str:
    """Return some values of a column as one text, or its error or size."""
    try:
        cells = _cells(columns, name, indices, LISTED_CHARACTERS_MAX)
    except DlfsError as error:
        return readable(f"{type(error).__name__}: {error}", TITLE_CHARACTERS_MAX)
    if cells is None:
        return f"{format_bytes(columns.column_bytes(name))}, not loaded"
    return ", ".join(cells)


# ---- batches -------------------------------------------------------------------------------------


def show_batch(batch: Any, columns: OpenColumns | None) -> str:
    """Return the page of a ``Batch``: thumbnails and attributes of its first samples.

    Args:
        batch: the batch.
        columns: returns the columns of its dataset; None for a batch of a bare reader.
    """
    count = min(len(batch), THUMBNAILS_MAX)

    def thumbnails() -> Html:
        made = Thumbnails(count)
        values = _values(batch, count)
        indices = batch.indices[:count].tolist()
        return row_of([made.card(v, str(i)) for i, v in zip(indices, values, strict=True)])

    def attributes() -> Html:
        indices = batch.indices[:count]
        found: dict[str, list[str]] = {
            "index": [f"{index:,}" for index in indices.tolist()],
            "bytes": [f"{length:,}" for length in batch.lengths[:count].tolist()],
        }
        right = ["index", "bytes"]
        known = None if columns is None else columns()
        dtypes = {} if known is None else _visible(known.dtypes)
        for name, dtype in islice(dtypes.items(), COLUMNS_MAX):
            title = readable(name)
            found[title] = _cells(known, name, indices) or ["not loaded"] * count
            right += [] if dtype == np.dtype(object) else [title]
        rows = zip(*found.values(), strict=True)
        return fragment(
            table([*found], [*rows], right=right) if count else Html(),
            _more(len(batch), "sample", count),
            _more(len(dtypes), "column", COLUMNS_MAX),
        )

    return page(lambda: repr(batch), thumbnails, attributes, lambda: _failures(batch))


def _failures(owner: Any) -> Html:
    """Return the samples that a batch or an epoch could not read; nothing if it read all."""
    found = owner.failures
    if not found:
        return Html()
    rows = [
        (f"{failure.index:,}", readable(failure.path), readable(failure.reason))
        for failure in found[:FAILURES_MAX]
    ]
    titles = ("failed sample", "path", "reason")
    return fragment(
        table(titles, rows, right=titles[:1]), _more(len(found), "failed sample", FAILURES_MAX)
    )


# ---- epochs --------------------------------------------------------------------------------------


def show_epoch(epoch: Any) -> str:
    """Return the page of an ``Epoch``: progress, rate, and where the time went."""

    def progress() -> Html:
        now = epoch.progress
        share = now.position / now.total if now.total else 1.0
        text = f"{now.position:,} of {now.total:,} ({share:.0%})"
        batches = format_count(now.batches_left, "batch", "batches")
        return fragment(bar((share, BLUE, text)), line(f"{text}, {batches} to come"))

    def times() -> Html:
        now = epoch.progress
        if not now.batches or now.seconds <= 0:
            return note("no batch taken yet")
        waited = min(1.0, now.waited_seconds / now.seconds)
        parts = (
            (waited, ORANGE, f"{waited:.0%} waiting for batches ({_seconds(now.waited_seconds)})"),
            (
                1 - waited,
                GREY,
                f"{1 - waited:.0%} in the loop ({_seconds(now.seconds - now.waited_seconds)})",
            ),
        )
        rate = f"{now.samples / now.seconds:,.0f} samples/s in {_seconds(now.seconds)}"
        words = ", ".join(label for _, _, label in parts)
        return fragment(bar(*parts), line(f"{rate}: {words}"))

    return page(lambda: repr(epoch), progress, times, lambda: _failures(epoch))


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
