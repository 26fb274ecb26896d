"""An S3 store on loopback, in this process: moto behind a layer that counts and damages answers."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest

import dlfs
from dlfs.ingest.importer import import_dataset, open_source

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "bucket"

Fault = Callable[[int, list[tuple[str, str]], bytes], tuple[int, list[tuple[str, str]], bytes]]
"""Function that changes the status, the headers and the body of an answer."""


class ObjectStore:
    """A server with one bucket. ``gets`` counts the answers to requests for each object."""

    def __init__(self) -> None:
        from moto.s3.models import s3_backends
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *args: Any) -> None:
                pass

        self._backend = s3_backends["123456789012"]["aws"]
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")
        self._application = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._listings: dict[str, tuple[list[Any], bytes]] = {}  # as moto sorts all keys for a page
        self.gets: Counter[str] = Counter()
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        """Faults of the next answers for an object, the first one first."""
        self.counted = threading.Condition(self._lock)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def put(self, key: str, data: bytes) -> None:
        """Store an object, without a request."""
        self._listings.clear()
        self._backend.put_object(BUCKET, key, data)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead programs to this server."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer one request (WSGI)."""
        path = environ["PATH_INFO"].encode("latin-1").decode()  # WSGI has its bytes as characters
        _, _, key = path.lstrip("/").partition("/")
        request = f"{environ['REQUEST_METHOD']} {path} {environ['QUERY_STRING']}"
        answer, body = self._listings.get(request, ([], b""))
        if not answer:
            body = b"".join(self._application(environ, lambda *parts: answer.extend(parts)))
        if environ["REQUEST_METHOD"] == "GET" and not key:
            self._listings[request] = answer, body
        status, headers = answer[0], answer[1]
        if environ["REQUEST_METHOD"] == "GET" and key:
            with self.counted:
                self.gets[key] += 1
                fault = self.faults[key].pop(0) if self.faults[key] else None
                self.counted.notify_all()
            if fault is not None:
                code, headers, body = fault(int(status.split()[0]), headers, body)
                status = f"{code} X"
        start_response(status, headers)
        return [body]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def broken(status: int, headers: list[tuple[str, str]], body: bytes) -> Any:
    """Answer with an internal error."""
    text = b"<Error><Code>InternalError</Code><Message>injected</Message></Error>"
    return 500, [("Content-Type", "text/xml"), ("Content-Length", str(len(text)))], text


def cut(status: int, headers: list[tuple[str, str]], body: bytes) -> Any:
    """Close the connection in the middle of the body."""
    return status, [*headers, ("Connection", "close")], body[: len(body) // 2]


def swapped(status: int, headers: list[tuple[str, str]], body: bytes) -> Any:
    """Answer with other bytes of the same length, under the same ETag."""
    return status, headers, body[::-1]


def run_import(environment: dict[str, str], url: str, volume: str, spool: str) -> None:
    """Import a URL in a process of its own."""
    os.environ.update(environment)
    with (
        dlfs.open(volume) as opened,
        closing(open_source(url, spool=spool)) as source,
    ):
        import_dataset(opened, source, "n")


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    import s3fs

    store = ObjectStore()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield store
    s3fs.S3FileSystem.clear_instance_cache()
    store.close()
