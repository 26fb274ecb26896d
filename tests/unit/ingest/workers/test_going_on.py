"""Plain imports and imports by workers go on with each other, and lose and double nothing."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset.parts_writer import WorkerStep
from dlfs.dataset.writer import DatasetWriter
from dlfs.errors import DeviceError, UsageError
from dlfs.ingest import importer
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.source import Division
from dlfs.ingest.workers import process
from dlfs.ingest.workers.import_setup import Before, ImportSetup, encode
from dlfs.ingest.workers.messages import StartPart
from tests.support.parts import Worker
from tests.support.volumes import new_volume

Digests = tuple[Any, ...]


def make_archives(folder: Path, *, zeros: bool, fifo_in: int | None = None) -> list[str]:
    """Make four compressed archives of ten samples of 5000 bytes."""
    drawn, paths = random.Random(1), []
    for number in range(4):
        path = folder / f"s{number}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for sample in range(10):
                data = bytes(5000) if zeros else drawn.randbytes(5000)
                info = tarfile.TarInfo(f"{number}/{sample}.bin")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            if number == fifo_in:
                info = tarfile.TarInfo(f"{number}/pipe")
                info.type = tarfile.FIFOTYPE
                archive.addfile(info)
        paths.append(str(path))
    return paths


def import_all(volume: dlfs.Volume, paths: list[str], step_bytes: int, **options: Any) -> Any:
    with closing(open_source(paths, format_name="webdataset")) as source:
        return import_dataset(
            volume, source, "x", layout="path", step_bytes=step_bytes, one_pass=True, **options
        )


def everything(volume: dlfs.Volume) -> Digests:
    volume.refresh()
    info = volume.versions("x")[-1]
    return info.sample_count, info.content_digest, info.packing_digest


class FewSteps:
    """The connection of a worker that is stopped when it has made a number of steps."""

    def __init__(self, worker: Worker, most: int) -> None:
        self.take = worker.take
        self.steps: list[Any] = []
        self._most = most

    def report(self, content: Any) -> None:
        if len(self.steps) >= self._most:
            raise process.WorkerEndedError("stopped")
        self.steps.append(content)

    def wait_for_commits(self) -> None:
        pass

    def report_progress(self, progress: Any) -> None:
        pass


@pytest.fixture
def import_some(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that imports some parts as a worker does, and ends."""

    def run(volume: dlfs.Volume, paths: list[str], parts: int, step_bytes: int, most: int) -> None:
        def run_parts(self: Any) -> None:
            writer = self._writer
            setup = ImportSetup.of(
                writer.options,
                volume_uri=volume.uri,
                volume_uuid=volume.uuid,
                skips_bad=False,
                labels={},
                spool=None,
                spool_bytes=None,
            )
            worker = Worker(volume, writer, "1", 0)
            writer.commit(reserve=1)
            writer.commit(reserve=1000)
            for part in range(parts):
                link: Any = FewSteps(worker, most)
                before = encode(Before.of(writer.progress(part), writer.schema))
                chunks = process.GrantedChunks(link, worker.devices, worker.geometry)
                start = StartPart(part, self._division.describe(part), before)
                with suppress(process.WorkerEndedError):
                    process.PartImport(link, chunks, setup, start, None).run()
                writer.commit([WorkerStep("1", content) for content in link.steps])
            worker.end()
            raise DeviceError("stopped here", 5)

        with monkeypatch.context() as patched:
            patched.setattr(importer.PartsImport, "run", run_parts)
            with pytest.raises(DeviceError, match="stopped here"):
                import_all(volume, paths, step_bytes, workers=1)
        volume.refresh()

    return run


@pytest.fixture
def volume(tmp_path: Path) -> Any:
    with dlfs.open(
        new_volume(tmp_path / "v.img", size_bytes=32 * MIB, chunk_bytes=4 * KIB)
    ) as opened:
        yield opened


@pytest.fixture
def whole(tmp_path: Path) -> Any:
    with dlfs.open(
        new_volume(tmp_path / "w.img", size_bytes=32 * MIB, chunk_bytes=4 * KIB)
    ) as opened:
        yield opened


def test_a_plain_import_goes_on_behind_parts_that_skipped_something(
    tmp_path: Path, volume: dlfs.Volume, whole: dlfs.Volume, import_some: Callable[..., None]
) -> None:
    paths = make_archives(tmp_path, zeros=False, fifo_in=1)
    import_some(volume, paths, 2, 45_000, 99)
    import_all(volume, paths, 45_000)
    import_all(whole, paths, 45_000)
    assert everything(volume) == everything(whole)
    assert everything(volume)[0] == 40


def test_a_plain_import_goes_on_in_the_only_part(
    tmp_path: Path, volume: dlfs.Volume, whole: dlfs.Volume, import_some: Callable[..., None]
) -> None:
    paths = make_archives(tmp_path, zeros=True)  # all files together are less than a step
    import_some(volume, paths, 1, 60_000, 2)
    import_all(volume, paths, 60_000)
    import_all(whole, paths, 60_000)
    assert everything(volume) == everything(whole)


def test_workers_go_on_in_the_only_part(
    tmp_path: Path,
    volume: dlfs.Volume,
    whole: dlfs.Volume,
    import_some: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = make_archives(tmp_path, zeros=True)
    commit, done = DatasetWriter.commit_step, []

    def commit_two(self: DatasetWriter, *arguments: Any, **options: Any) -> Any:
        done.append(commit(self, *arguments, **options))
        if len(done) == 2:
            raise DeviceError("stopped here", 5)
        return done[-1]

    with monkeypatch.context() as patched:
        patched.setattr(DatasetWriter, "commit_step", commit_two)
        with pytest.raises(DeviceError, match="stopped here"):
            import_all(volume, paths, 60_000)
    import_some(volume, paths, 1, 60_000, 99)
    import_all(volume, paths, 60_000)
    import_all(whole, paths, 60_000)
    assert everything(volume) == everything(whole)


def test_parts_that_mean_other_samples_are_refused(
    tmp_path: Path,
    volume: dlfs.Volume,
    import_some: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = make_archives(tmp_path, zeros=False)
    import_some(volume, paths, 1, 45_000, 99)
    divide = importer.divide

    def otherwise(*arguments: Any, **options: Any) -> Division:
        found = divide(*arguments, **options)
        return Division([size + 1 for size in found.part_bytes], found.describe)

    monkeypatch.setattr(importer, "divide", otherwise)
    with pytest.raises(UsageError, match=r"the parts of the source as the unfinished import has"):
        import_all(volume, paths, 45_000, workers=1)
