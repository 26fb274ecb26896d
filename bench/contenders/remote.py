"""The import of tar shards from a web server, and what fsspec fetches of it."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import dlfs
from bench.datasets import DATASET, Scene, volume_bytes
from bench.errors import Unavailable
from bench.measurement import CHECKED, Environment, Measurement, check_bytes
from bench.process import find_program
from bench.resources import timed
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.remote.fetching import REQUESTS
from dlfs.ingest.remote.stores import PIECE_BYTES

SHARDS = 16
START_S = 10.0
"""Longest wait for the web server, in seconds."""

_SETTINGS = """\
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; worker_processes 2;
{user}
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000;
  server {{ listen 127.0.0.1:{port}; root {folder}; }}
}}
"""


def make_shards(scene: Scene) -> list[Path]:
    """Return tar archives of the samples that are plain files; make them unless they are there."""
    folder = scene.folder / "shards"
    paths = [folder / f"{number:02}.tar" for number in range(SHARDS)]
    if not folder.exists():
        folder.mkdir()
        for number, path in enumerate(paths):
            with tarfile.open(path, "w") as archive:
                for index in scene.file_indices[number::SHARDS].tolist():
                    member = tarfile.TarInfo(scene.source.path(index).decode())
                    member.size = int(scene.source.lengths[index])
                    archive.addfile(member, io.BytesIO(scene.source.data(index)))
    return paths


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Serve the files of a folder, and yield the URL of the folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = find_program("nginx", "nginx-light")
    settings = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    settings.write_text(_SETTINGS.format(folder=folder, port=port, user=user))
    command = [program, "-p", str(folder), "-c", str(settings)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                if time.monotonic() > until or server.poll() is not None:
                    raise Unavailable("nginx does not answer")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _warm(paths: list[Path]) -> None:
    """Read the shards, so that the server has them in memory, as if it were another machine."""
    for path in paths:
        path.read_bytes()


@dataclass(frozen=True)
class ImportShards:
    """The import of the shards into a new volume, until the data is on the disk."""

    label = f"DLFS import of {SHARDS} tar shards from a web server"

    def run(self, environment: Environment) -> Measurement:
        scene = environment.scene
        paths = make_shards(scene)
        target = scene.folder / "imported.img"
        total = int(scene.source.lengths[scene.file_indices].sum())
        size_bytes = 3 * volume_bytes(len(scene.file_indices), total)
        dlfs.format_volume(str(target), size_bytes=size_bytes, force=True)
        environment.machine.require_cold()
        _warm(paths)
        try:
            with web_server(scene.folder) as url, dlfs.open(str(target)) as volume:
                urls = [f"{url}/shards/{path.name}" for path in paths]
                with timed() as watch:
                    source = open_source(urls, spool=scene.folder / "spool")
                    with contextlib.closing(source):
                        report = import_dataset(volume, source, DATASET)
                some = scene.file_order(0)[:CHECKED].tolist()
                with volume.dataset(DATASET) as dataset:
                    found = {index: dataset.get(scene.source.path(index)) for index in some}
        finally:
            target.unlink()
        checked = check_bytes(scene.source, found)
        return Measurement(
            report.sample_count, report.sample_bytes, watch.seconds, watch.cpu_seconds, checked
        )


@dataclass(frozen=True)
class FetchShards:
    """The same shards into memory by fsspec, with as many requests in flight, of the same size."""

    label = f"fsspec alone, {REQUESTS} requests of {PIECE_BYTES >> 20} MiB"

    def run(self, environment: Environment) -> Measurement:
        import fsspec

        scene = environment.scene
        paths = make_shards(scene)
        environment.machine.require_cold()
        _warm(paths)
        with web_server(scene.folder) as url:
            system, _ = fsspec.core.url_to_fs(f"{url}/shards/{paths[0].name}")
            pieces = [
                (f"{url}/shards/{path.name}", first, min(first + PIECE_BYTES, size))
                for path in paths
                for size in [path.stat().st_size]
                for first in range(0, size, PIECE_BYTES)
            ]
            with timed() as watch, ThreadPoolExecutor(REQUESTS) as executor:
                got = executor.map(lambda piece: len(system.cat_file(*piece)), pieces)
                fetched = sum(got)
        if fetched != sum(path.stat().st_size for path in paths):
            raise Unavailable("nginx sends other bytes than the shards have")
        total = int(scene.source.lengths[scene.file_indices].sum())
        return Measurement(len(scene.file_indices), total, watch.seconds, watch.cpu_seconds)
