"""``dlfs import --workers``: bad records, appending, what is shown, and the choice of workers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.cli.output import human_size
from dlfs.cli.progress import progress_bar
from dlfs.cli.verbs import import_
from dlfs.ingest import importer
from dlfs.ingest.progress import Progress, WorkerProgress
from dlfs.ingest.workers.by_workers import WorkersOptions
from tests.support.files import write_files
from tests.support.parts import Worker, open_parts
from tests.support.volumes import new_volume
from tests.unit.cli.conftest import Done, Run
from tests.unit.ingest.test_bad_records import write_tfrecord
from tests.unit.ingest.workers.test_running import waiting_import

SHARDS = 6
BAD = {1, 4}
"""Records of each shard with a wrong checksum."""
STEP = ("--step", "100")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for number in range(SHARDS):
        written = write_tfrecord(tmp_path / f"{number}", BAD if number % 2 else set())
        (tmp_path / f"s{number}.tfrecord").hardlink_to(written.path)
    return str(tmp_path / f"s{{0..{SHARDS - 1}}}.tfrecord")


def new(path: Path) -> str:
    return str(new_volume(path, size_bytes=16 * MIB, chunk_bytes=16 * KIB))


def report(done: Done) -> dict[str, Any]:
    """Return what an import reports, without what differs from one to the next.

    One without workers lists bad records as it reads them; one with workers, by their names.
    """
    found = json.loads(done.out)
    found["bad_records"]["records"].sort(key=lambda one: (one["source"], one["record"]))
    for key in ("uuid", "created"):
        del found["dataset"][key]
    del found["seconds"]
    return found


def lines(done: Done) -> list[str]:
    return [re.sub(r" in [\d.]+ s, .*", "", line) for line in done.err.splitlines()]


@pytest.mark.parametrize("allowed", ["100", "50%"])
def test_bad_records_of_all_workers_are_one_report(
    tmp_path: Path, shards: str, run: Run, allowed: str
) -> None:
    options = ("--name", "x", "--skip-bad", allowed, *STEP, "--json")
    plain = run("import", shards, new(tmp_path / "1.img"), *options)
    found = run("import", shards, new(tmp_path / "2.img"), *options, "--workers", 2)
    assert (found.code, plain.code) == (4, 4)
    assert report(found) == report(plain)
    assert report(found)["bad_records"]["count"] == len(BAD) * SHARDS // 2
    assert sorted(lines(found)) == sorted(lines(plain))


@pytest.mark.parametrize("allowed", [str(len(BAD) * SHARDS // 2 - 1), "5%"])
def test_the_limit_of_bad_records_is_one_for_all_workers(
    tmp_path: Path, shards: str, run: Run, allowed: str
) -> None:
    """No part has as many as the limit, or only those of a few parts are over it."""
    options = ("--name", "x", "--skip-bad", allowed, *STEP)
    plain = run("import", shards, new(tmp_path / "1.img"), *options)
    found = run("import", shards, new(tmp_path / "2.img"), *options, "--workers", 2)
    assert found.code == plain.code != 0
    wanted = f"expected at most {allowed.replace('%', ' %')} bad records, got"
    assert wanted in " ".join(found.err.split())
    assert wanted in " ".join(plain.err.split())


def test_without_the_option_the_first_bad_record_ends_the_import(
    tmp_path: Path, shards: str, run: Run
) -> None:
    found = run("import", shards, new(tmp_path / "2.img"), "--name", "x", *STEP, "--workers", 2)
    assert found.code == 4
    (line,) = found.err.splitlines()  # nothing of a lost worker
    assert "as the checksum of its 20 bytes" in line


def test_appending(tmp_path: Path, run: Run) -> None:
    for name, first in (("old", 0), ("new", 40)):
        write_files(tmp_path / name, {f"{n:03}": bytes([n]) * n for n in range(first, first + 40)})
    digests = []
    for number, workers in enumerate(((), ("--workers", 2))):
        volume = new(tmp_path / f"{number}.img")
        options = ("--name", "x", *STEP, *workers)
        run("import", tmp_path / "old", volume, *options)
        done = run("import", tmp_path / "new", volume, *options, "--append")
        assert done.code == 0
        assert "x@2 has 80 samples" in done.err
        again = run("import", tmp_path / "new", volume, *options, "--append")
        assert (again.code, "--skip-existing" in again.err) == (1, True)
        run("import", "--abandon", "x", volume)
        with dlfs.open(volume) as opened, opened["x"] as dataset:
            assert dataset.get("079") == bytes([79]) * 79
            digests.append(opened.versions("x")[-1].content_digest)
    assert digests[0] == digests[1]


# ---- what others see -----------------------------------------------------------------------------


def test_granted_space_is_listed_separately(tmp_path: Path, run: Run) -> None:
    volume = new(tmp_path / "disk")
    with dlfs.open(volume) as opened:
        free_bytes = opened.free_bytes
        parts = open_parts(opened)
        parts.commit(reserve=8)
        worker = Worker(opened, parts, "a")
        parts.commit(worker.write(0).reports())
        (info,) = opened.unfinished()
        whole = human_size(info.stored_bytes + info.granted_bytes)
        assert 0 < info.granted_bytes < 8 * 16 * KIB
        shown = run("info", volume)
        assert "granted" in shown.out.decode()
        (found,) = run("info", volume, "--json").json["unfinished"]
        assert found["granted_bytes"] == info.granted_bytes
        assert f"{whole} of unfinished" in run("du", volume).out.decode()
        worker.close()
    done = run("import", "--abandon", "x", volume)
    assert f"{whole} are free now" in done.err
    with dlfs.open(volume) as opened:
        assert opened.free_bytes == free_bytes


def test_top_shows_an_import_that_runs(tmp_path: Path, run: Run) -> None:
    folder = write_files(tmp_path / "folder", {f"{n}": bytes(n) for n in range(20)})
    volume = new(tmp_path / "disk")
    with waiting_import(folder, volume, tmp_path / "join") as process:
        (found,) = run("top", volume, "--json").json["imports"]
        assert (found["pid"], found["name"]) == (process.pid, "x")
        assert (found["parts"], found["parts_done"], found["bytes_total"]) == (1, 0, sum(range(20)))
        shown = run("top", volume, "--interval", "0.1").out.decode()
        assert f"import of x into {volume}: process {process.pid}, up" in " ".join(shown.split())
        process.kill()
    done = run("top", volume)
    assert done.code == 3
    assert "'dlfs info' lists unfinished imports" in " ".join(done.err.split())


def test_without_a_terminal_a_slow_worker_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (
        WorkerProgress(f"host:{number}", number, 10 << 20, 20 << 20, 0, 5 << 20, number == 1)
        for number in (1, 2)
    )
    with progress_bar("import x") as bar:
        for part in (1, 1, 3):
            workers = (replace(slow, part=part), fast)
            bar.show(Progress(1, 2, 3, 4, 5.0, workers=workers))
    expected = [f"import x: worker host:1 is slow: part {part} at 5 MiB/s" for part in (1, 3)]
    assert capsys.readouterr().err.splitlines() == expected


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 5),
        (("--workers", "0"), 0),
        (("--workers", "1"), 1),
        (("--workers", "3"), 3),
        (("--skip-bad", "1"), 0),
        (("--skip-bad", "1", "--workers", "2"), 2),
        (("--one-pass",), 0),
        (("--one-pass", "--workers", "2"), 2),
        (("--step", "0"), 0),
        (("--append", "--skip-existing"), 0),
        (("--append",), 5),
    ],
)
def test_the_number_of_workers(
    tmp_path: Path,
    run: Run,
    options: tuple[str, ...],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A source for which five would be chosen."""
    chosen: list[int] = []

    def import_dataset(*_arguments: Any, workers: WorkersOptions | int, **_options: Any) -> None:
        chosen.append(workers if isinstance(workers, int) else workers.count)

    monkeypatch.setattr("dlfs.ingest.workers.by_workers.default_workers", lambda *_: 5)
    monkeypatch.setattr(importer, "import_dataset", import_dataset)
    monkeypatch.setattr(import_, "_report", lambda *_arguments, **_options: None)
    folder = write_files(tmp_path / "folder", {"a": b"1"})
    done = run("import", folder, new(tmp_path / "disk"), "--name", "x", *options)
    assert (done.code, chosen) == (0, [expected])


@pytest.mark.parametrize("option", ["--skip-existing", "--step"])
def test_what_needs_steps_is_refused(tmp_path: Path, run: Run, option: str) -> None:
    folder, volume = write_files(tmp_path / "folder", {"a": b"1"}), new(tmp_path / "disk")
    run("import", folder, volume, "--name", "x")
    given = ("--append", option) if option == "--skip-existing" else (option, "0")
    done = run("import", folder, volume, "--name", "x", "--workers", 2, *given)
    assert done.code == 2
    assert "expected an import in steps" in " ".join(done.err.split())
