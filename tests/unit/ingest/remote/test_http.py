"""Imports from a web server of this machine, with and without ranges, checksums and versions."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import (
    ChecksumError,
    DeviceError,
    DeviceTimeoutError,
    DlfsError,
    FormatError,
    NotFoundError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.remote import failures, fetching, stores
from dlfs.ingest.remote.stores import HttpStore, RemoteObject
from tests.support.files import tar
from tests.support.waiting import SECONDS_MAX
from tests.unit.ingest.taking import take

pytest.importorskip("aiohttp")
DATA = bytes(range(256)) * 20


class Web:
    """A server whose files are in ``files``. Its attributes change what it answers."""

    def __init__(self) -> None:
        self.files = {"/d/a b.bin": DATA, "/d/c.bin": b"", "/d/": b'<a href="a%20b.bin">a</a>'}
        self.has_ranges = True
        self.headers: dict[str, str] = {}
        self.get_headers: dict[str, str] = {}
        self.head_status = 0
        """Status of every answer to HEAD, and to GET of what is looked up; 0: as it is."""
        self.versions: list[str] = []
        """ETags of the next GET answers."""
        self.content_range = "bytes {first}-{last}/{size}"
        self.statuses: list[int] = []
        """Statuses of the next GET answers; 0 closes the connection in the middle of the body."""
        self.page_statuses: dict[str, int] = {}
        """Statuses of all answers to GET of pages; 0 as above."""
        self.gets: Counter[str] = Counter()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                web.answer(self, is_head=True)

            def do_GET(self) -> None:
                web.answer(self, is_head=False)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: Any, *, is_head: bool) -> None:
        path = request.path.partition("?")[0].replace("%20", " ")
        data, span = self.files.get(path), request.headers.get("Range")
        status = 404 if data is None else 200
        data = data or b""
        if not is_head:
            self.gets[path] += 1
            if self.versions and not path.endswith("/"):
                self.get_headers["ETag"] = self.versions.pop(0)
            if self.statuses and not path.endswith("/"):
                status = self.statuses.pop(0)
            status = self.page_statuses.get(path, status)
        status = self.head_status or status
        headers = {**self.headers, **({} if is_head else self.get_headers)}
        if span and self.has_ranges and status == 200:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            here = {"first": first, "last": last, "size": len(data)}
            headers["Content-Range"] = self.content_range.format(**here, length=last - first)
            data, status = data[first : last + 1], 206
        request.send_response(status or 200)
        headers["Content-Type"] = "text/html" if path.endswith("/") else "application/data"
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if not is_head:
            request.wfile.write(data if status else data[: len(data) // 2])


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(failures, "DELAY_S", 0.001)
    monkeypatch.setattr(failures, "ATTEMPTS_MAX", 3)
    web = Web()
    thread = threading.Thread(target=web.server.serve_forever, args=(0.01,))
    thread.start()
    yield web
    web.server.shutdown()
    thread.join()
    web.server.server_close()


def fetched(url: str, spool: Path) -> dict[str, bytes]:
    source = open_source(url, format_name="folder", spool=spool)
    return {path: data for path, (data, _) in take(source).items()}


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_page_of_links_is_a_folder(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ranges: bool
) -> None:
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    web.has_ranges = has_ranges
    web.headers = {"Accept-Ranges": "bytes"} if has_ranges else {}
    web.files["/d/"] += b'<a href="c.bin">c</a>'
    assert fetched(f"{web.url}/d/", tmp_path) == {"a b.bin": DATA, "c.bin": b""}
    assert web.gets["/d/a b.bin"] == (7 if has_ranges else 3)
    assert web.gets["/d/c.bin"] == 1  # which gives its size, too


def test_checksums_of_the_server_are_checked(web: Web, tmp_path: Path) -> None:
    digest = base64.b64encode(hashlib.sha256(DATA).digest()).decode()
    web.headers = {"Digest": f"SHA-256={digest}"}
    web.statuses = [503, 0]
    assert fetched(f"{web.url}/d/", tmp_path) == {"a b.bin": DATA}
    assert web.gets["/d/a b.bin"] == 3
    web.headers = {"Content-MD5": base64.b64encode(bytes(16)).decode()}
    with pytest.raises(ChecksumError, match=f"import {web.url}/d/a%20b.bin: expected md5 0000"):
        fetched(f"{web.url}/d/", tmp_path / "other")


@pytest.mark.parametrize("listed", [True, False])
def test_a_body_that_the_server_encodes_is_refused(web: Web, tmp_path: Path, listed: bool) -> None:
    web.files["/d/a b.bin"] = gzip.compress(DATA)
    encoding = {"Content-Encoding": "gzip"}
    web.headers, web.get_headers = (encoding, {}) if listed else ({}, encoding)
    error = UsageError if listed else FormatError
    with pytest.raises(error, match=r"a%20b.bin: expected .*Content-Encoding.*import the copy"):
        fetched(f"{web.url}/d/a%20b.bin", tmp_path)


@pytest.mark.parametrize("field", ["ETag", "Last-Modified"])
def test_a_file_that_changes_after_the_listing_is_an_error(
    web: Web, tmp_path: Path, field: str
) -> None:
    web.headers, web.get_headers = {field: "one"}, {field: "two"}
    with pytest.raises(DeviceError, match=r"a%20b.bin: the object changed .* got .*=two"):
        fetched(f"{web.url}/d/a%20b.bin", tmp_path)


def test_a_file_that_changes_between_two_ranges_is_an_error(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    web.versions = ["one", "one", "one", "two"]  # of its size, a look-up of ranges, and ranges
    with pytest.raises(DeviceError, match=r"a%20b.bin: the object changed .* got .*=two"):
        fetched(f"{web.url}/d/", tmp_path)
    assert fetched(f"{web.url}/d/", tmp_path) == {"a b.bin": DATA}


@pytest.mark.parametrize(
    ("content_range", "error"),
    [
        ("bytes 0-{length}/{size}", "expected bytes .* of 5120, got Content-Range .bytes 0-"),
        ("", "expected bytes .* got Content-Range 'none'"),
        ("bytes {first}-{last}/5121", "the object changed .* got 5121 bytes"),
    ],
)
def test_another_range_than_was_asked_for_is_an_error(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content_range: str, error: str
) -> None:
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    web.content_range = content_range
    with pytest.raises(DeviceError, match=f"import {web.url}/d/a%20b.bin: .*{error}"):
        fetched(f"{web.url}/d/", tmp_path)


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ([404], "the object was removed"),
        ([403], "the store denies access"),
        ([412], "the object changed"),
        ([500] * 3, "500"),
    ],
)
def test_an_answer_that_stays_wrong_is_an_error(
    web: Web, tmp_path: Path, statuses: list[int], error: str
) -> None:
    web.statuses = statuses
    with pytest.raises(DeviceError, match=f"import {web.url}/d/a%20b.bin: .*{error}"):
        fetched(f"{web.url}/d/", tmp_path)
    assert web.statuses == []


def test_a_body_that_stays_cut_is_an_error(web: Web, tmp_path: Path) -> None:
    web.statuses = [0] * 3
    with pytest.raises(TruncatedError, match=f"import {web.url}/d/a%20b.bin: read: "):
        fetched(f"{web.url}/d/", tmp_path)


def test_a_file_that_is_not_there_is_an_error(web: Web, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such object or folder"):
        open_source(f"{web.url}/nothing.tar?query=1", spool=tmp_path)


def test_a_server_that_fails_is_not_a_file_that_is_missing(web: Web, tmp_path: Path) -> None:
    web.head_status = 503
    with pytest.raises(DeviceError, match=f"import {web.url}/d/c.bin: 503"):
        open_source(f"{web.url}/d/c.bin", spool=tmp_path)
    with pytest.raises(DeviceError, match=r"import http://127.0.0.1:1/x.tar: .*[Cc]onnect"):
        open_source("http://127.0.0.1:1/x.tar", spool=tmp_path)


SECRETS = ("pass-word", "sig-nature")


def with_secrets(web: Web, path: str) -> str:
    return f"{web.url.replace('http://', 'http://user:pass-word@')}{path}?X-Signature=sig-nature"


def chain_of(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


def test_passwords_and_signatures_of_urls_are_in_no_message_or_file(
    web: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "dlfs")
    monkeypatch.setattr(stores, "PIECE_BYTES", 1000)
    seen: list[str] = []
    web.files["/d/a.tar"] = tar(("a.bin", DATA))

    def fails(path: str) -> None:
        with pytest.raises(DlfsError) as caught:
            open_source(with_secrets(web, path), spool=tmp_path / "spool")
        seen.append(chain_of(caught.value) + str(getattr(caught.value, "__notes__", "")))

    fails("/d/missing.bin")
    web.head_status = 403
    fails("/d/c.bin")
    web.head_status = 0
    web.statuses = [200, *[500] * 200]
    fails("/d/a.tar")
    web.statuses = []
    url = with_secrets(web, "/d/a.tar")
    with closing(open_source(url, spool=tmp_path / "spool")) as source:
        seen.append(source.name)
        (manifest,) = (tmp_path / "spool").rglob("manifest.jsonl")
        assert "/d/a.tar?***" in manifest.read_text()
        files = list(manifest.parent.rglob("*"))
        seen += [path.read_text("latin-1") for path in files if path.is_file()]
        seen += map(str, files)
        assert {name: data for name, (data, _) in take(source).items()} == {"a.bin": DATA}
    with pytest.raises(DlfsError) as caught:
        open_source(with_secrets(web, "/d/{1..x}"), spool=tmp_path / "spool")
    seen.append(chain_of(caught.value))
    with pytest.raises(DlfsError) as caught:
        dlfs.open(with_secrets(web, "/d/a.bin"))
    seen.append(str(caught.value))
    text = "".join(seen) + caplog.text
    assert "127.0.0.1" in text
    for secret in SECRETS:
        assert secret not in text


@pytest.mark.parametrize("hangs", [True, False])
def test_an_object_that_cannot_be_read_ends_the_import_at_once(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Whether the requests in flight end behind the error, or never."""
    links = "".join(f'<a href="{number:02}.bin">{number}</a>' for number in range(30))
    web.files["/d/"] = links.encode()

    async def look_up(self: HttpStore, item: RemoteObject) -> tuple[RemoteObject, None]:
        is_bad = item.name == "04.bin"
        for _ in range(1 if is_bad else 20):
            await asyncio.sleep(0)
        if is_bad:
            raise UsageError("it has no size")
        await asyncio.sleep(3600 if hangs else 0)
        return replace(item, size_bytes=9), None

    monkeypatch.setattr(HttpStore, "look_up", look_up)
    monkeypatch.setattr(fetching, "GRACE_S", 0.01)
    with pytest.raises(UsageError, match="it has no size"):
        fetched(f"{web.url}/d/", tmp_path)


@pytest.mark.parametrize("status", [404, 403, 503, 0])
def test_a_folder_below_that_cannot_be_listed_is_an_error(
    web: Web, tmp_path: Path, status: int
) -> None:
    web.files["/d/"] += b'<a href="below/">below</a>'
    web.files["/d/below/"] = b'<a href="c.bin">c</a>'
    web.files["/d/below/c.bin"] = DATA
    assert set(fetched(f"{web.url}/d/", tmp_path)) == {"a b.bin", "below/c.bin"}
    web.page_statuses["/d/below/"] = status
    error = NotFoundError if status == 404 else DlfsError
    with pytest.raises(error, match=f"import {web.url}/d/below"):
        fetched(f"{web.url}/d/", tmp_path)


def test_pages_that_lead_on_for_ever_are_an_error(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "FOLDER_CHARACTERS_MAX", 50)
    for depth in range(30):
        web.files["/d/" + depth * "d/"] = b'<a href="d/">d</a>'
    with pytest.raises(FormatError, match="expected a path of at most 50 characters"):
        fetched(f"{web.url}/d/", tmp_path)


@pytest.mark.parametrize("name", ["s.tar", "d/a.bin"])
def test_an_object_that_two_sources_name_is_refused_for_its_paths(
    web: Web, tmp_path: Path, name: str
) -> None:
    web.files |= {"/s.tar": tar(("x", DATA)), "/d/a.bin": DATA}
    volume = tmp_path / "v.img"
    dlfs.format_volume(volume, size_bytes=16 * MIB)
    form = "auto" if name == "s.tar" else "folder"
    urls = 2 * [f"{web.url}/{name}"]
    with (
        dlfs.open(volume) as opened,
        pytest.raises(DlfsError, match="expected each path once"),
        closing(open_source(urls, format_name=form, spool=tmp_path / "spool")) as source,
    ):
        import_dataset(opened, source, "x")


# ---- a server that does not answer ---------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections, as one that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_server_that_does_not_answer_is_an_error(
    silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "DELAY_S", 0.001)
    monkeypatch.setattr(failures, "ATTEMPTS_MAX", 2)
    monkeypatch.setattr(stores, "_READ_S", 0.05)
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    for path in ("d/", "a.bin"):
        with pytest.raises(DeviceTimeoutError, match=f"import {url}/{path}"):
            fetched(f"{url}/{path}", tmp_path)


@pytest.fixture
def dripping(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that sends the headers, or the body, of an answer to GET a byte at a time."""
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()

        def do_GET(self) -> None:
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n"
            if request.param == "body":
                self.wfile.write(head + b"\r\n")
            else:
                self.wfile.write(head + b"X-Long: ")
            while not gone.wait(0.01):
                self.wfile.write(b"a")

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        gone.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("dripping", "part"), [("headers", "headers"), ("body", "bytes")], indirect=["dripping"]
)
def test_a_server_that_sends_a_byte_now_and_then_is_an_error(
    dripping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(failures, "DELAY_S", 0.001)
    monkeypatch.setattr(failures, "ATTEMPTS_MAX", 2)
    monkeypatch.setattr(stores, "_READ_S", 0.3)  # more than between two of the bytes
    monkeypatch.setattr(stores, "_CONNECT_S", 0.3)
    with pytest.raises(DeviceTimeoutError, match=rf"import {dripping}/a.bin: .*expected .*{part}"):
        fetched(f"{dripping}/a.bin", tmp_path)


@pytest.mark.parametrize("path", ["d/", "a.bin", "{a,b}.bin"])
def test_ctrl_c_ends_an_import_whose_server_does_not_answer(
    silent: socket.socket, tmp_path: Path, path: str
) -> None:
    dlfs.format_volume(tmp_path / "v.img", size_bytes=16 * MIB)
    url = f"http://127.0.0.1:{silent.getsockname()[1]}/{path}"
    words = ["import", url, str(tmp_path / "v.img"), "--name", "x", "--spool", str(tmp_path / "s")]
    command = [sys.executable, "-m", "dlfs.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as done, silent.accept()[0]:
        done.send_signal(signal.SIGINT)
        _, messages = done.communicate(timeout=SECONDS_MAX)
    assert done.returncode == 130, messages
