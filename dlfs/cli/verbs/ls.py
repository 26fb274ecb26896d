"""``dlfs ls``: lists the datasets of a volume, or the samples of one.

A listing is written page by page, however many samples there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlfs.base.wording import quote
from dlfs.cli.datasets import dataset_table
from dlfs.cli.options import (
    JsonOption,
    OptionalDatasetArgument,
    VolumeArgument,
    open_dataset,
    open_volume,
)
from dlfs.cli.output import (
    human_samples,
    human_size,
    json_path,
    print_data,
    print_json,
    print_json_stream,
    show_path,
    terminal_columns,
    write_bytes,
)
from dlfs.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from dlfs import Dataset

PAGE = 4096
"""Number of names between two writes."""


@dataclass(frozen=True, slots=True)
class _Item:
    path: bytes
    name: bytes
    """Printed name: the whole path, or one component."""
    is_directory: bool
    index: int
    """Index of the sample, or of the first sample below a directory."""
    size: int
    """Size of a sample in bytes; of a directory, the number of samples below it."""


def ls(
    volume: VolumeArgument,
    dataset: OptionalDatasetArgument = None,
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]")] = "",
    long: Annotated[bool, typer.Option("--long", "-l")] = False,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", "-R")] = False,
    exact: Annotated[bool, typer.Option("--bytes", "-b")] = False,
    null: Annotated[bool, typer.Option("--null", "-0")] = False,
    json: JsonOption = False,
) -> None:
    """List datasets, or the samples of one.

    Args:
        prefix: A directory, or one sample.
        long: Sizes, indices, dates too.
        recursive: Every sample below, by its whole path.
        exact: Sizes in bytes, with -l.
        null: End names with NUL instead of a line break.

    Examples:
        dlfs ls photos.img
        dlfs ls -l photos.img photos dog
        dlfs ls -R -0 photos.img photos | xargs -0 -n 1 echo
    """
    if dataset is None:
        _list_datasets(volume, long=long, json=json)
        return
    if null and (long or json):
        raise UsageError("list: expected -0 without -l and --json")
    with open_dataset(volume, dataset) as found:
        where = os.fsencode(prefix).strip(b"/")
        end = b"\0" if null else b"\n"
        if recursive and not (long or json) and found.directory.is_directory(where):
            _write_paths(found, where, end)
            return
        items = _items(found, where, recursive=recursive)
        if json:
            head = {"dataset": found.name, "version": found.version, "prefix": json_path(where)}
            print_json_stream(head, "entries", (_item_json(item) for item in items))
        elif long:
            _write_long(items, exact=exact)
        else:
            _write_names(items, end)


def _list_datasets(uri: str, *, long: bool, json: bool) -> None:
    with open_volume(uri) as volume:
        infos = volume.datasets()
    if json:
        print_json({"datasets": [asdict(info) for info in infos]})
    elif long:
        print_data(dataset_table(infos))
    elif infos:
        print("\n".join(f"{info.name}@{info.version}" for info in infos))


def _items(dataset: Dataset, where: bytes, *, recursive: bool) -> Iterator[_Item]:
    """Return the items to list; looks up the first, so that errors come before any output."""
    items = _samples(dataset, where) if recursive else _children(dataset, where)
    first = next(items, None)
    if first is not None:
        return chain([first], items)
    if dataset.directory.is_directory(where):
        return iter(())
    index = int(dataset.index_of([where])[0])
    if index < 0:
        from dlfs.directory import near_paths

        raise NotFoundError(
            f"list {dataset.name}@{dataset.version}: no sample or directory {quote(where)}; "
            f"{near_paths(dataset.directory, where)}"
        )
    length = int(dataset.lengths([index])[0])
    return iter([_Item(where, where, False, index, length)])


def _samples(dataset: Dataset, where: bytes) -> Iterator[_Item]:
    first, last = dataset.directory.subtree_range(where)
    for start in range(first, last, PAGE):
        count = min(PAGE, last - start)
        indices = range(start, start + count)
        lengths = dataset.lengths(list(indices)).tolist()
        for path, index, length in zip(dataset.paths(start, count), indices, lengths, strict=True):
            yield _Item(path, path, False, index, length)


def _children(dataset: Dataset, where: bytes) -> Iterator[_Item]:
    base = where + b"/" if where else b""
    children = dataset.directory.children(where)
    while entries := list(islice(children, PAGE)):
        files = [entry.first_index for entry in entries if not entry.is_directory]
        lengths = iter(dataset.lengths(files).tolist())
        for entry in entries:
            path = base + entry.name
            if entry.is_directory:
                first, last = dataset.directory.subtree_range(path)
                yield _Item(path, entry.name + b"/", True, first, last - first)
            else:
                yield _Item(path, entry.name, False, entry.first_index, next(lengths))


def _item_json(item: _Item) -> dict[str, Any]:
    if item.is_directory:
        return {
            "path": json_path(item.path),
            "kind": "directory",
            "first_index": item.index,
            "sample_count": item.size,
        }
    return {
        "path": json_path(item.path),
        "kind": "sample",
        "index": item.index,
        "length_bytes": item.size,
    }


def _write_paths(dataset: Dataset, where: bytes, end: bytes) -> None:
    """Write whole paths; as ``_write_names``, but without work for each of them."""
    first, last = dataset.directory.subtree_range(where)
    terminal = sys.stdout.isatty()
    for start in range(first, last, PAGE):
        paths = dataset.paths(start, min(PAGE, last - start))
        shown = [show_path(path).encode() for path in paths] if terminal else paths
        write_bytes(end.join(shown) + end)


def _write_names(items: Iterator[_Item], end: bytes) -> None:
    terminal = sys.stdout.isatty()
    while page := list(islice(items, PAGE)):
        names = (item.name for item in page)
        if terminal:
            names = (_coloured(item, show_path(item.name)).encode() for item in page)
        write_bytes(b"".join(name + end for name in names))


def _write_long(items: Iterator[_Item], *, exact: bool) -> None:
    width = terminal_columns(sys.stdout)
    size_of = str if exact else human_size
    head = f"{'INDEX':>10}  {'SIZE':>16}  "
    write_bytes(f"{head}NAME\n".encode())
    while page := list(islice(items, PAGE)):
        lines = []
        for item in page:
            size = human_samples(item.size) if item.is_directory else size_of(item.size)
            name = _folded(item, width - len(head), len(head)) if width else item.name
            lines.append(f"{item.index:>10}  {size:>16}  ".encode() + name + b"\n")
        write_bytes(b"".join(lines))


def _folded(item: _Item, width: int, indent: int) -> bytes:
    """Return a name folded into lines of a width."""
    text = show_path(item.name)
    if len(text) <= width and text.isascii():
        return _coloured(item, text).encode()
    from rich.cells import chop_cells

    pieces = [_coloured(item, piece) for piece in chop_cells(text, max(1, width))]
    return f"\n{'':{indent}}".join(pieces).encode()


def _coloured(item: _Item, text: str) -> str:
    return f"\x1b[1;34m{text}\x1b[0m" if item.is_directory else text
