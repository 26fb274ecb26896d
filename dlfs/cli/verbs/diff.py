"""``dlfs diff``: compares two datasets, or two versions of one, without reading samples."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlfs.base.wording import dtype_name
from dlfs.cli.exits import ExitCode
from dlfs.cli.options import JsonOption, VolumeArgument, complete_dataset, open_volume
from dlfs.cli.output import (
    human_samples,
    human_size,
    json_path,
    print_fields,
    print_json,
    print_json_stream,
    show_path,
    show_text,
    write_bytes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlfs import Dataset, DatasetDiff

MARKS = {"added": b"+", "removed": b"-", "changed": b"~", "attributes": b"@"}
"""Character before a path in a listing, by the kind of difference."""

_Item = tuple[bytes, str, int | None, int | None]
"""A path, the kind of its difference, and its length in both datasets, in bytes."""


def diff(
    volume: VolumeArgument,
    a: Annotated[str, typer.Argument(metavar="A", autocompletion=complete_dataset)],
    b: Annotated[str, typer.Argument(metavar="B", autocompletion=complete_dataset)],
    other: Annotated[str | None, typer.Option(metavar="VOLUME")] = None,
    long: Annotated[bool, typer.Option("--long", "-l")] = False,
    json: JsonOption = False,
) -> None:
    """Show what B has, and A has not: samples by path, and attributes.

    Samples are the same if path, length and stored CRC32C are equal; no sample is read. The exit
    code is 1 if the datasets differ.

    Args:
        a: NAME, or NAME@VERSION.
        b: The dataset to compare with A.
        other: The volume of B, if it is another.
        long: List paths: + added, - removed, ~ changed, @ only attributes changed.

    Examples:
        dlfs diff photos.img photos@1 photos@2
        dlfs diff photos.img photos photos --other copy.img --long
    """
    from dlfs.volume.comparison import diff as compare

    with ExitStack() as stack:
        first = stack.enter_context(open_volume(volume))
        second = first if other is None else stack.enter_context(open_volume(other))
        datasets = (
            stack.enter_context(first.dataset(a)),
            stack.enter_context(second.dataset(b)),
        )
        found = compare(*datasets)
        if json:
            _print_json(found, datasets, long=long)
        elif long:
            _list(found, datasets)
        else:
            _summarise(found, datasets)
    if found:
        raise typer.Exit(ExitCode.FAILURE)


def _summarise(found: DatasetDiff, datasets: tuple[Dataset, Dataset]) -> None:
    a, b = datasets
    fields = {
        "a": f"{show_text(found.a.name)}@{found.a.version}",
        "b": f"{show_text(found.b.name)}@{found.b.version}",
        "added": _sized(b, found.added),
        "removed": _sized(a, found.removed),
        "changed": human_samples(len(found.changed)),
        "attributes": f"changed in {human_samples(len(found.attributes_changed))} of equal bytes",
        "same": human_samples(found.same_count),
    }
    columns = [f"{show_text(name)}: added" for name in found.columns_added]
    columns += [f"{show_text(name)}: removed" for name in found.columns_removed]
    columns += [
        f"{show_text(name)}: {_type(here)} in A, {_type(there)} in B"
        for name, (here, there) in found.columns_retyped.items()
    ]
    columns += [
        f"{show_text(name)}: changed in {human_samples(count)}"
        for name, count in found.columns_changed.items()
    ]
    print_fields(fields | ({"columns": "\n".join(columns)} if columns else {}))


def _sized(dataset: Dataset, indices: NDArray[Any]) -> str:
    size = human_size(int(dataset.lengths(indices).sum()))
    return f"{human_samples(len(indices))}, {size}"


def _type(dtype: Any) -> str:
    return dtype_name(dtype)


# ---- listing -------------------------------------------------------------------------------------


def _items(found: DatasetDiff, datasets: tuple[Dataset, Dataset]) -> Iterator[_Item]:
    """Yield all samples that differ, in the order of paths."""
    a, b = datasets
    return heapq.merge(
        _one_sided(b, found.added, "added"),
        _one_sided(a, found.removed, "removed"),
        _two_sided(a, b, found.changed, "changed"),
        _two_sided(a, b, found.attributes_changed, "attributes"),
    )


def _one_sided(dataset: Dataset, indices: NDArray[Any], kind: str) -> Iterator[_Item]:
    for page in _pages(indices):
        for path, size in zip(dataset.paths_of(page), dataset.lengths(page).tolist(), strict=True):
            sizes = (None, size) if kind == "added" else (size, None)
            yield path, kind, *sizes


def _two_sided(a: Dataset, b: Dataset, indices: NDArray[Any], kind: str) -> Iterator[_Item]:
    for page in _pages(indices):
        paths = a.paths_of(page)
        sizes = a.lengths(page).tolist(), b.lengths(b.index_of(paths)).tolist()
        for path, here, there in zip(paths, *sizes, strict=True):
            yield path, kind, here, there


def _pages(indices: NDArray[Any]) -> Iterator[NDArray[Any]]:
    from dlfs.volume.comparison import PAGE_SAMPLES

    for first in range(0, len(indices), PAGE_SAMPLES):
        yield indices[first : first + PAGE_SAMPLES]


def _list(found: DatasetDiff, datasets: tuple[Dataset, Dataset]) -> None:
    terminal = sys.stdout.isatty()
    for path, kind, _, _ in _items(found, datasets):
        shown = show_path(path).encode() if terminal else path
        write_bytes(MARKS[kind] + b" " + shown + b"\n")


# ---- JSON ----------------------------------------------------------------------------------------


def _print_json(found: DatasetDiff, datasets: tuple[Dataset, Dataset], *, long: bool) -> None:
    head = {
        "a": asdict(found.a),
        "b": asdict(found.b),
        "differ": bool(found),
        "added": len(found.added),
        "removed": len(found.removed),
        "changed": len(found.changed),
        "attributes_changed": len(found.attributes_changed),
        "same": found.same_count,
        "columns_added": {name: _type(dtype) for name, dtype in found.columns_added.items()},
        "columns_removed": {name: _type(dtype) for name, dtype in found.columns_removed.items()},
        "columns_retyped": {
            name: [_type(dtype) for dtype in both] for name, both in found.columns_retyped.items()
        },
        "columns_changed": found.columns_changed,
    }
    if long:
        print_json_stream(head, "samples", map(_json, _items(found, datasets)))
    else:
        print_json(head)


def _json(item: _Item) -> dict[str, Any]:
    path, kind, here, there = item
    return {
        "path": json_path(path),
        "difference": kind,
        "length_bytes_a": here,
        "length_bytes_b": there,
    }
