"""A bucket on loopback: moto in a process of its own, with samples as objects and as archives."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.arriving.parts import HEAD_BYTES
from bench.errors import Unavailable
from bench.process import ROOT, started

BUCKET = "bucket"
SHARDS = 8
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Variables with which programs are clients of the bucket, besides its address."""


def sample(number: int, size: int) -> bytes:
    """Return a sample: its number in decimal, then bytes that do not compress."""
    return b"%0*d" % (HEAD_BYTES, number) + os.urandom(size - HEAD_BYTES)


def shard_urls() -> list[str]:
    """Return the URLs of the archives."""
    return [f"s3://{BUCKET}/shards/{shard:02}.tar" for shard in range(SHARDS)]


def serve(samples: int, size: int) -> None:
    """Serve the bucket until the parent closes standard input; write the address to stdout."""
    try:
        from moto.s3.models import get_canned_acl, s3_backends
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise Unavailable(f"moto: {error}") from error
    backend: Any = s3_backends["123456789012"]["aws"]
    backend.create_bucket(BUCKET, "us-east-1")
    archives = [io.BytesIO() for _ in range(SHARDS)]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(tarfile.open(fileobj=archive, mode="w")) for archive in archives
        ]
        for number in range(samples):
            data = sample(number, size)
            backend.put_object(BUCKET, f"files/{number % 10}/{number:08}.bin", data)
            info = tarfile.TarInfo(f"{number:08}.bin")
            info.size = size
            writers[number % SHARDS].addfile(info, io.BytesIO(data))
    for shard, archive in enumerate(archives):
        stored = backend.put_object(BUCKET, f"shards/{shard:02}.tar", archive.getvalue())
        stored.set_acl(get_canned_acl("public-read"))  # who reads over HTTP has no key
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(json.dumps(f"http://{host}:{port}"), flush=True)
    sys.stdin.read()
    server.stop()


@contextmanager
def bucket(samples: int, size: int) -> Iterator[dict[str, str]]:
    """Serve a bucket; yield the variables of its clients."""
    command = [sys.executable, "-m", "bench.arriving", "--serve"]
    command += ["--samples", str(samples), "--size", str(size)]
    with started(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        line = server.stdout.readline()
        if not line:
            raise Unavailable("the bucket was not served; moto is a package of the extra dev")
        yield {**KEYS, "AWS_ENDPOINT_URL": json.loads(line)}
