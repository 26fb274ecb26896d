"""Objects in the descriptions of parts: as they were listed, with the URLs that name them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from dlfs.errors import DlfsError
from dlfs.ingest.descriptions import Object, ObjectSource, malformed
from dlfs.ingest.isolation.messages import to_bytes, to_text
from dlfs.ingest.remote.stores import RemoteObject
from dlfs.ingest.source import clean_path


def describe_objects(
    items: Iterable[tuple[str, RemoteObject]],
) -> tuple[list[ObjectSource], list[Object]]:
    """Return the messages of objects, each given with the URL that names it or its folder."""
    numbers: dict[str, int] = {}
    sources: list[ObjectSource] = []
    objects: list[Object] = []
    for url, item in items:
        if url not in numbers:
            numbers[url] = len(sources)
            sources.append(_source(url, item))
        number = numbers[url]
        below = to_bytes(f"/{item.name}")
        own_url, own_path = to_bytes(item.url), to_bytes(item.path)
        objects.append(
            Object(
                number,
                below[1:],
                b"" if own_url == sources[number].base_url + below else own_url,
                b"" if own_path == sources[number].base_path + below else own_path,
                item.size_bytes,
                to_bytes(item.version),
                dict(item.digests),
                item.has_ranges,
            )
        )
    return sources, objects


def _source(url: str, item: RemoteObject) -> ObjectSource:
    """Return the message of a URL, given the first object under it."""
    base_path = item.path.removesuffix(f"/{item.name}") if item.name else ""
    return ObjectSource(to_bytes(url), to_bytes(url.rstrip("/")), to_bytes(base_path))


def read_objects(
    sources: Sequence[ObjectSource], objects: Sequence[Object]
) -> tuple[list[str], list[tuple[int, RemoteObject]]]:
    """Return the URLs, and the objects with the numbers of their URLs, of messages.

    Raises:
        FormatError: an object has no such URL, or no name that a path can have.
    """
    found: list[tuple[int, RemoteObject]] = []
    for one in objects:
        if one.source >= len(sources):
            raise malformed(f"expected one of {len(sources)} URLs, got number {one.source}")
        name = to_text(one.name)
        _check_name(name)
        base = sources[one.source]
        item = RemoteObject(
            to_text(one.url or base.base_url + b"/" + one.name),
            to_text(one.path or base.base_path + b"/" + one.name),
            name,
            one.size_bytes,
            to_text(one.version),
            one.digests,
            one.has_ranges,
        )
        found.append((one.source, item))
    return [to_text(source.url) for source in sources], found


def _check_name(name: str) -> None:
    """Check that a name leads to a file in the folder of the copies, and nowhere else."""
    raw = os.fsencode(name)
    try:
        is_clean = clean_path(raw, "open a part of a source") == raw
    except DlfsError as error:
        raise malformed(f"expected the name of an object: {error}") from error
    if not is_clean:
        raise malformed(f"expected the name of an object, got {name!r}")
