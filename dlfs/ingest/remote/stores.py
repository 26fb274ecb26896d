"""Lists and reads the objects of stores through fsspec.

``open_store`` makes the file system of a URL. Credentials, endpoints and regions are those that its
package finds by itself: the environment, its configuration files, or fsspec's configuration.

``Store`` reads any file system, one range at a time, in a thread for each request. ``S3Store`` and
``HttpStore`` are asynchronous, and see the headers of the responses as well. They compare each
response's version (ETag, else time of change) with the listing's, and stream bodies; ``Store``
looks an object up again after reading it.

Threads: any at once; coroutines belong to the thread of fsspec's event loop.
"""

from __future__ import annotations

import asyncio
import errno
import glob
import importlib
import os
import re
import time
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any

from dlfs.base.extras import install_command, load_package
from dlfs.base.threads import map_waiting
from dlfs.base.units import MIB
from dlfs.base.wording import redact
from dlfs.errors import DeviceError, DlfsError, FormatError, NotFoundError, UsageError
from dlfs.ingest.remote.digests import Digests, etag_digests, find_digests
from dlfs.ingest.remote.failures import cause_of, is_temporary, status_of, typed, with_retries
from dlfs.ingest.remote.urls import is_http, plain_path
from dlfs.ingest.source import clean_path

PIECE_BYTES = 8 * MIB
"""Most bytes that one request asks for, where the store can read ranges."""

UNKNOWN_SIZE = -1

FOLDER_CHARACTERS_MAX = 8192
"""Most characters of the path of a folder that is listed: pages of links can lead on for ever."""

REQUESTS = 16
"""Most requests of a fetch in flight."""

LOOKUPS = 16
"""Most objects that are looked up at a time."""

BODY_BYTES = MIB
"""Bytes that the event loop sums and writes itself; a thread does it for more."""
_MISSING_STATUS = (404, 410)
_CONNECT_S = 30
_READ_S = 60
"""Longest wait for the next bytes of a response over HTTP, in seconds; also for its headers, once
there is a connection."""
LEAST_BYTES = 4 << 10
"""Fewest bytes of a body that come while a request waits for ``_READ_S``: of a server, or a
network, that sends a byte now and then, nothing would ever be complete."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_VERSIONS = (
    "ETag", "etag", "generation", "blob_id", "Last-Modified", "LastModified", "last_modified",
    "updated", "mtime", "created",
)  # fmt: skip
"""Fields of fsspec's file systems that change with an object, the most reliable first."""

_S3 = ("s3", "s3a")
_PACKAGES = {
    "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""Package that reads the URLs of a scheme, for the error if it is missing."""

Sink = Callable[[bytes], None]
"""Function that takes the next bytes of a range."""
InThread = Callable[..., Awaitable[Any]]
"""Function that calls a function with arguments in a thread of a pool."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object as it was listed."""

    url: str
    path: str
    """Path in its file system."""
    name: str
    """Path under the folder that the source names; empty if the source is this object."""
    size_bytes: int
    """Size in bytes; ``UNKNOWN_SIZE`` if the listing does not have it."""
    version: str
    """Result of ``version_of``: the ETag, or another field that changes with the object."""
    digests: Digests = field(default_factory=dict)
    has_ranges: bool = True
    """True if the store reads ranges of this object; else one request reads all of it."""

    @property
    def has_size(self) -> bool:
        """True if the size is known."""
        return self.size_bytes != UNKNOWN_SIZE

    @property
    def shown(self) -> str:
        """URL of the object for messages and records, without passwords and queries."""
        return redact(self.url)

    @property
    def piece_bytes(self) -> int:
        """Most bytes of a piece."""
        return PIECE_BYTES if self.has_ranges else max(1, self.size_bytes)

    def changed(self, what: str) -> DeviceError:
        """Return the error for an object that is not as it was listed."""
        return DeviceError(
            f"import {self.shown}: the object changed during the import: expected "
            f"{self.size_bytes} bytes of {self.version or 'an unknown version'}, got {what}",
            errno.ESTALE,
        )


class Store:
    """A file system of fsspec that holds objects.

    Args:
        system: the file system.

    Attributes:
        can_look_up_later: True if ``find`` may list a folder's objects without their sizes.
    """

    can_look_up_later = False

    def __init__(self, system: Any) -> None:
        self._system = system

    def find(self, url: str) -> list[RemoteObject]:
        """List the object that a URL names, or all objects under the folder that it names.

        Raises:
            NotFoundError: there is nothing of this name.
            FormatError: an object's name is not valid as a path.
            DlfsError: the store cannot be read.
        """
        what = f"import {redact(url)}"
        path = self._system._strip_protocol(url)  # fsspec has no public method for this
        info = None if url.endswith("/") else _ask(lambda: self._system.info(path), what)
        if info is not None and info["type"] != "directory":
            return self.look_up_now([self._object(url, path, "", info)])
        base = url.rstrip("/")
        found = self._find_all(path, base)
        if not found:
            raise NotFoundError(f"{what}: there is no object in the folder")
        objects = []
        for full, entry in sorted(found.items()):
            name = full[len(path.rstrip("/")) :].strip("/")
            if not name or full.endswith("/"):  # a key that stands for the folder itself
                size = entry.get("size") or entry.get("Size") or 0
                if not size:
                    continue
                raise FormatError(
                    f"{what}: object {redact(full)}: expected no data behind a key that ends with "
                    f"'/', got {size} bytes; no sample can have this path: copy the object to "
                    "another key"
                )
            here = full if is_http(full) else f"{base}/{name}"
            if is_http(url):  # without what only URLs have
                name = plain_path(f"http://host/{name}").lstrip("/")
            clean = os.fsdecode(clean_path(os.fsencode(name), f"import {redact(here)}"))
            objects.append(self._object(here, full, clean, entry))
        return objects if self.can_look_up_later else self.look_up_now(objects)

    def _find_all(self, path: str, base: str) -> dict[str, Mapping[str, Any]]:
        """Return what is listed of each object under a folder, by its path.

        fsspec's own walk leaves out a folder below that it cannot list.
        """
        if not _walks(self._system):
            listed = _ask(lambda: self._system.find(path, detail=True), f"import {redact(base)}")
            return dict(listed)
        entries = self._walk(path, base)
        return {entry["name"]: entry for entry in entries if entry["type"] != "directory"}

    def _walk(
        self, path: str, base: str, depth_max: int | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Yield what is listed of all objects and folders under a folder.

        Args:
            path: the folder.
            base: its URL.
            depth_max: most folders on a path, with the first; None without a bound.
        """
        folders = [(path, 1)]
        for folder, depth in folders:
            below = folder[len(path.rstrip("/")) :]
            what = f"import {redact(base + below)}"
            if len(below) > FOLDER_CHARACTERS_MAX:
                raise FormatError(
                    f"{what}: expected a path of at most {FOLDER_CHARACTERS_MAX} characters"
                )
            for entry in _ask(partial(self._system.ls, folder, detail=True), what):
                name = entry["name"]
                if entry["type"] != "directory":
                    yield entry
                elif name.rstrip("/") != folder.rstrip("/"):
                    yield entry
                    if depth_max is None or depth < depth_max:
                        folders.append((name, depth + 1))

    def match(self, pattern: str) -> list[str]:
        """Return the URLs that a glob matches, sorted.

        Raises:
            NotFoundError: it matches nothing.
            DlfsError: the store cannot be read.
        """
        what = f"import {redact(pattern)}"
        if _walks(self._system):
            found = sorted(self._match_walked(pattern))
        else:
            found = sorted(with_retries(lambda: self._system.glob(pattern), what))
        if not found:
            raise NotFoundError(f"{what}: nothing matches")
        return [str(self._system.unstrip_protocol(path)) for path in found]

    def _match_walked(self, pattern: str) -> set[str]:
        """Return the paths that a glob matches, in a file system that lists each folder."""
        full = self._system._strip_protocol(pattern)
        parts = full.split("/")
        fixed = list(takewhile(lambda part: not glob.has_magic(part), parts))
        root, magic = "/".join(fixed), parts[len(fixed) :]
        base = self._system.unstrip_protocol(root)
        wanted = re.compile(importlib.import_module("fsspec.utils").glob_translate(full))
        depth_max = None if "**" in magic else len(magic)
        names = (entry["name"].rstrip("/") for entry in self._walk(root, base, depth_max))
        return {name for name in names if wanted.match(name)}

    async def fetch(
        self, item: RemoteObject, first: int, last: int, sink: Sink, in_thread: InThread
    ) -> Digests:
        """Read the bytes ``first`` to ``last`` (excluded) of an object.

        Returns:
            Digests of the whole object that the response gives.

        Raises:
            DeviceError: the object changed.
            Exception: the libraries behind fsspec raise what they like; see ``failures``.
        """
        found: Digests = await in_thread(self.read, item, first, last, sink)
        return found

    async def recheck(self, item: RemoteObject, in_thread: InThread) -> None:
        """Check that an object is as it was listed, after all of it was read.

        Raises:
            DlfsError: the object changed, or the store cannot be read.
        """
        await in_thread(with_retries, lambda: self.check_unchanged(item), f"import {item.shown}")

    def read(self, item: RemoteObject, first: int, last: int, sink: Sink) -> Digests:
        """Read a range in the caller's thread; see ``fetch``."""
        sink(self._system.cat_file(item.path, start=first, end=last))
        return {}

    def check_unchanged(self, item: RemoteObject) -> None:
        """Compare an object with the listing in the caller's thread; see ``recheck``."""
        info = self._system.info(item.path)
        got = version_of(info)
        if info["size"] != item.size_bytes or differs(got, item.version):
            raise item.changed(f"{info['size']} bytes of {got or 'an unknown version'}")

    async def look_up(self, item: RemoteObject) -> tuple[RemoteObject, bytes | None]:
        """Return an object of unknown size with its size and version, and its bytes if they came.

        Raises:
            UsageError: the store does not say the size.
            Exception: as ``fetch``.
        """
        raise _no_size(item.url)

    def look_up_now(self, items: Sequence[RemoteObject]) -> list[RemoteObject]:
        """Return objects with their sizes and versions, of which some are unknown.

        Raises:
            UsageError: the store does not say a size.
            DlfsError: the store cannot be read.
        """
        return [self._with_info(item) if not item.has_size else item for item in items]

    def _with_info(self, item: RemoteObject) -> RemoteObject:
        info = with_retries(lambda: self._system.info(item.path), f"import {item.shown}")
        found = self._object(item.url, item.path, item.name, info)
        if not found.has_size:
            raise _no_size(item.url)
        return found

    def _object(self, url: str, path: str, name: str, info: Mapping[str, Any]) -> RemoteObject:
        size = info.get("size")
        size = UNKNOWN_SIZE if size is None else int(size)
        return RemoteObject(url, path, name, size, version_of(info), find_digests(info))


class _StreamingStore(Store):
    """A store whose responses are streamed, and compared with the listing by their headers."""

    async def fetch(
        self, item: RemoteObject, first: int, last: int, sink: Sink, in_thread: InThread
    ) -> Digests:
        """Stream a range, or the object without a range if it is one piece; see ``Store``."""
        digests: Digests = {}
        received: list[bytes] = []
        size_bytes = 0
        writing: asyncio.Future[None] | None = None
        try:
            async with aclosing(self._receive(item, first, last, digests)) as body:
                async for data in _kept_up(body):
                    received.append(data)
                    size_bytes += len(data)
                    if size_bytes >= BODY_BYTES:
                        if writing is not None:
                            await writing
                        writing = asyncio.ensure_future(in_thread(_sink_all, received, sink))
                        received, size_bytes = [], 0
        finally:
            if writing is not None:
                await writing
        _sink_all(received, sink)
        return digests

    async def recheck(self, item: RemoteObject, in_thread: InThread) -> None:
        """Do nothing: every response was compared with the listing."""

    @abstractmethod
    def _receive(
        self, item: RemoteObject, first: int, last: int, digests: Digests
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a range; add the digests of the object that the response gives."""


class S3Store(_StreamingStore):
    """Objects of S3 and of stores with its protocol."""

    async def _receive(
        self, item: RemoteObject, first: int, last: int, digests: Digests
    ) -> AsyncGenerator[bytes, None]:
        bucket, key, version = self._system.split_path(item.path)
        options = {"VersionId": version} if version else {}
        if last - first < item.size_bytes:
            options["Range"] = f"bytes={first}-{last - 1}"
        # s3fs has no public method that returns the headers of a response.
        response = await self._system._call_s3("get_object", Bucket=bucket, Key=key, **options)
        digests |= etag_digests(response) | find_digests(response)
        body = response["Body"]
        try:
            if differs(version_of(response), item.version):
                raise item.changed(version_of(response))
            if "Range" in options:
                _check_range(item, first, last, response.get("ContentRange"))
            while data := await body.read(BODY_BYTES):
                yield data
        finally:
            body.close()


class HttpStore(_StreamingStore):
    """Files of web servers. A page of links, which is a folder, does not have their sizes."""

    can_look_up_later = True

    async def _receive(
        self, item: RemoteObject, first: int, last: int, digests: Digests
    ) -> AsyncGenerator[bytes, None]:
        del digests
        is_part = last - first < item.size_bytes
        async with self._get(item.path, f"{first}-{last - 1}" if is_part else None) as answer:
            self._check_answer(item, answer)
            got = version_of(answer.headers)
            if differs(got, item.version):
                raise item.changed(got)
            if is_part and answer.status != 206:
                raise item.changed(f"status {answer.status} for a range")
            if is_part:
                _check_range(item, first, last, answer.headers.get("Content-Range"))
            async for data in answer.content.iter_any():
                yield data

    def _check_answer(self, item: RemoteObject, answer: Any) -> None:
        """Check that a response has the bytes of the file."""
        answer.raise_for_status()
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding not in ("", "identity"):
            raise FormatError(
                f"import {item.url}: expected the bytes of the file, got them encoded as "
                f"{encoding} (Content-Encoding), which the server was asked not to do; "
                "download the file, and import the copy"
            )

    @asynccontextmanager
    async def _get(self, path: str, span: str | None) -> AsyncIterator[Any]:
        """Send a request, and yield the response when its headers are there."""
        session = await self._system.set_session()
        options = dict(self._system.kwargs)
        headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
        if span is not None:
            headers["Range"] = f"bytes={span}"
        url = self._system.encode_url(path)
        limit_s = _CONNECT_S + _READ_S
        try:
            async with asyncio.timeout(limit_s):
                answer = await session.get(url, **options, headers=headers)
        except TimeoutError as error:
            what = str(error) or f"expected the headers of the response in {limit_s} s, got less"
            raise TimeoutError(what) from error
        async with answer:
            yield answer

    async def _has_ranges(self, path: str) -> bool:
        async with self._get(path, "0-0") as answer:
            return bool(answer.status == 206)

    async def look_up(self, item: RemoteObject) -> tuple[RemoteObject, bytes | None]:
        """Request an object, and take its body if it is one piece; see ``Store``."""
        async with self._get(item.path, None) as answer:
            self._check_answer(item, answer)
            headers, size_bytes, body = answer.headers, answer.content_length, None
            if size_bytes is None:  # its end is that of the body
                body = await _read_all(answer)
                size_bytes = len(body)
                if size_bytes > PIECE_BYTES:
                    raise _no_size(item.url)
            elif size_bytes <= PIECE_BYTES:
                body = await _read_all(answer)
        version, digests = version_of(headers), find_digests(headers)
        found = RemoteObject(item.url, item.path, item.name, size_bytes, version, digests)
        if body is not None:
            return found, body
        if headers.get("Accept-Ranges") == "bytes":
            return found, None
        return replace(found, has_ranges=await self._has_ranges(item.path)), None

    def look_up_now(self, items: Sequence[RemoteObject]) -> list[RemoteObject]:
        """Look up the sizes of objects, and whether the server reads ranges of the large ones."""
        return map_waiting(self._with_info, items, LOOKUPS)

    def _with_info(self, item: RemoteObject) -> RemoteObject:
        found = item if item.has_size else super()._with_info(item)
        if found.size_bytes <= PIECE_BYTES:
            return found
        what = f"import {item.shown}"
        has_ranges = with_retries(lambda: _run(self._system, self._has_ranges, item.path), what)
        return replace(found, has_ranges=has_ranges)


async def _kept_up(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of a body.

    Raises:
        TimeoutError: fewer than ``LEAST_BYTES`` came in ``_READ_S`` of waiting.
    """
    waited_s, count, began_s = 0.0, 0, time.monotonic()
    async for data in body:
        waited_s += time.monotonic() - began_s
        count += len(data)
        if waited_s > _READ_S:
            if count < LEAST_BYTES:
                raise TimeoutError(
                    f"expected at least {LEAST_BYTES} bytes of the body in {_READ_S} s, got {count}"
                )
            waited_s, count = 0.0, 0
        yield data
        began_s = time.monotonic()


async def _read_all(answer: Any) -> bytes:
    """Return a body, or what there is of it when it is longer than ``PIECE_BYTES``."""
    received, size_bytes = [], 0
    async for data in _kept_up(answer.content.iter_any()):
        received.append(data)
        size_bytes += len(data)
        if size_bytes > PIECE_BYTES:
            break
    return b"".join(received)


def _walks(system: Any) -> bool:
    """Return True if a file system finds objects by fsspec's walk, which lists each folder."""
    kind = type(system)
    if hasattr(kind, "_find"):
        asyn = importlib.import_module("fsspec.asyn")
        return bool(kind._find is asyn.AsyncFileSystem._find)
    return bool(kind.find is importlib.import_module("fsspec.spec").AbstractFileSystem.find)


def _ask(request: Callable[[], Any], what: str) -> Any:
    """Run a request for a listing or for what is known of an object, as ``with_retries`` does.

    Raises:
        NotFoundError: there is nothing of this name.
        DlfsError: the store cannot be read.
    """

    def run() -> Any:
        try:
            return request()
        except (FileNotFoundError, NotADirectoryError) as error:
            cause = error.__cause__  # over HTTP, any failure becomes this error
            if isinstance(cause, Exception) and (
                is_temporary(cause) or status_of(cause) not in (None, *_MISSING_STATUS)
            ):
                raise cause from None
            raise NotFoundError(f"{what}: there is no such object or folder") from cause_of(error)

    return with_retries(run, what)


def _no_size(url: str) -> UsageError:
    return UsageError(
        f"import {redact(url)}: expected a size from the store, got none, as of files that a web "
        "server sends encoded (Content-Encoding: gzip); download it, and import the copy"
    )


def version_of(info: Mapping[str, Any]) -> str:
    """Return the field, and its value, that changes with an object; empty if there is none."""
    for name in _VERSIONS:
        value = info.get(name)
        if value:
            text = value.timestamp() if isinstance(value, datetime) else value
            return f"{name}={str(text).strip(chr(34))}"
    return ""


def differs(version: str, other: str) -> bool:
    """Return True if two versions of one field differ; a listing may lack what a response has."""
    return version.partition("=")[0] == other.partition("=")[0] and version != other


def open_store(url: str) -> Store:
    """Open the store of a URL.

    Raises:
        UsageError: no package reads such URLs, or it is not installed, or URLs are chained.
        DlfsError: the store refuses its configuration.
    """
    what = f"import {redact(url)}"
    if "::" in url:
        raise UsageError(f"{what}: expected one URL, got several joined by '::'")
    core = load_package("fsspec.core", extra="fsspec", what=what)
    try:
        options = _options_of(url)
        system, _ = core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        name = url.partition("://")[0]
        package = _PACKAGES.get(name)
        command = install_command("s3") if name in _S3 else package and f"pip install {package}"
        raise UsageError(
            f"{what}: expected a package that reads such URLs ({error})"
            + (f": {command}" if command else "")
        ) from error
    except DlfsError:
        raise
    except ValueError as error:
        raise UsageError(f"{what}: {redact(str(error))}") from cause_of(error)
    except Exception as error:  # noqa: BLE001
        raise typed(error, what) from cause_of(error)
    protocols = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
    if "s3" in protocols and hasattr(system, "_call_s3"):
        return S3Store(system)
    if "https" in protocols and hasattr(system, "encode_url"):
        return HttpStore(system)
    return Store(system)


def _options_of(url: str) -> dict[str, Any]:
    """Return the options of a URL's file system: fsspec's configuration, else our limits.

    botocore opens 10 connections by default. A request that waits for one is passed by later
    requests, as aiohttp gives a free connection to the next one that asks. So a wait has no bound.
    """
    if is_http(url):
        limits = importlib.import_module("aiohttp").ClientTimeout(
            total=None, sock_connect=_CONNECT_S, sock_read=_READ_S
        )
        return _configured(("http", "https"), "client_kwargs", {"timeout": limits})
    if url.partition("://")[0] in _S3:
        return _configured(_S3, "config_kwargs", {"max_pool_connections": REQUESTS})
    return {}


def _configured(
    protocols: Sequence[str], option: str, default: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an option of a file system: defaults of ours, and fsspec's configuration of it."""
    configuration = importlib.import_module("fsspec.config").conf
    value = dict(default)
    for protocol in protocols:
        value |= configuration.get(protocol, {}).get(option, {})
    return {option: value}


def _check_range(item: RemoteObject, first: int, last: int, got: str | None) -> None:
    """Check the Content-Range of a response to a request for a range.

    Raises:
        DeviceError: the store sends other bytes, or the object has another size.
    """
    match = _CONTENT_RANGE.fullmatch((got or "").strip())
    if match is None or (int(match[1]), int(match[2]) + 1) != (first, last):
        raise DeviceError(
            f"import {item.shown}: expected bytes {first} to {last} of {item.size_bytes}, got "
            f"Content-Range {got or 'none'!r}: the server, or a cache before it, does not answer "
            "ranges as RFC 9110 says",
            errno.EIO,
        )
    if match[3] not in ("*", str(item.size_bytes)):
        raise item.changed(f"{match[3]} bytes")


def _sink_all(received: Sequence[bytes], sink: Sink) -> None:
    for data in received:
        sink(data)


def _run(system: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a coroutine on the thread of fsspec's asynchronous file systems."""
    return importlib.import_module("fsspec.asyn").sync(system.loop, function, *arguments)
