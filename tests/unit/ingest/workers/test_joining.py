"""Workers that join an import by a file: the worker is ``dlfs import-worker``, a process."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.cli.exits import ExitCode
from dlfs.errors import DlfsError, ExistsError, NotFoundError, SpaceError, UsageError
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.ingest.workers import joining
from dlfs.ingest.workers.addresses import Address
from dlfs.ingest.workers.by_workers import WorkersOptions
from dlfs.ingest.workers.invitation import (
    CannotJoinError,
    ImportEndedError,
    Invitation,
    clear_ended,
)
from dlfs.ingest.workers.joining import join_import
from dlfs.ingest.workers.process import NotNeededError, run_worker
from dlfs.ingest.workers.starting import start_workers
from tests.support.files import write_files
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume
from tests.support.waiting import wait_for

NQN = "nqn.2024-01.org.example:disk"
FILES = 200
HERE = Address("127.0.0.1")
ELSEWHERE = str(uuid4())
"""The ID of another host's running system."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    files = {f"{n % 7}/{n:03}": n.to_bytes(2) * (n * 37 % 4000) for n in range(FILES)}
    return write_files(tmp_path / "s", files)


@pytest.fixture
def volume(tmp_path: Path) -> str:
    return str(new_volume(tmp_path / "disk", size_bytes=24 * MIB, chunk_bytes=16 * KIB))


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[str]:
    disk = tmp_path / "namespace"
    disk.touch()
    os.truncate(disk, 24 * MIB)
    with ScriptedTarget([Subsystem(NQN, [Namespace(24 * MIB, path=disk, identity=uuid4())])]) as it:
        uri = f"nvme-tcp://127.0.0.1:{it.port}/{NQN}?nsid=1"
        dlfs.format_volume(uri, chunk_bytes=16 * KIB)
        yield uri


def run(volume: str, source: Path, workers: int | WorkersOptions = 0) -> ImportReport:
    with dlfs.open(volume) as target, closing(open_source(source)) as opened:
        return import_dataset(target, opened, "x", step_bytes=64 * KIB, workers=workers)


class Import:
    """An import by workers that join, in a thread.

    Attributes:
        file: by which they join.
    """

    def __init__(self, volume: str, source: Path, *, listen: Address | None = None) -> None:
        self.file = str(source.parent / "join")
        start = start_workers(None, listen=listen, join_file=self.file)
        options = WorkersOptions(4, start=start)
        self._result: ImportReport | Exception | None = None

        def target() -> None:
            try:
                self._result = run(volume, source, options)
            except Exception as error:  # noqa: BLE001  for the test
                self._result = error

        self._thread = threading.Thread(target=target)
        self._thread.start()
        wait_for(lambda: os.path.exists(self.file) or self._result, "the file")

    def result(self) -> ImportReport:
        self._thread.join()
        with pytest.raises(ImportEndedError):
            Invitation.read(self.file)
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result


@contextmanager
def start_worker(file: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "dlfs.cli", "import-worker", file, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def seen(report: ImportReport) -> tuple[object, ...]:
    return report.dataset.content_digest, report.dataset.packing_digest


def test_workers_of_this_host(tmp_path: Path, source: Path, volume: str) -> None:
    file = str(source.parent / "join")
    with start_worker(file) as first, start_worker(file) as second:  # they wait for the file
        report = Import(volume, source).result()
        assert (first.wait(), second.wait()) == (0, 0)
    plain = run(str(new_volume(tmp_path / "2", size_bytes=24 * MIB, chunk_bytes=16 * KIB)), source)
    assert seen(report) == seen(plain)


def move(invitation: Invitation) -> Invitation:
    """Return an invitation as it looks from another host."""
    return dataclasses.replace(invitation, boot_id=ELSEWHERE)


def test_workers_of_other_hosts(tmp_path: Path, source: Path, volume: str, nvme: str) -> None:
    plain = run(volume, source)
    made = Import(nvme, source, listen=HERE)
    moved = tmp_path / "moved"
    move(Invitation.read(made.file)).write(str(moved))
    with start_worker(str(moved)) as worker:
        output, _ = worker.communicate()
        assert worker.returncode == 0, output
    assert seen(made.result()) == seen(plain)


def finish(made: Import) -> None:
    with start_worker(made.file) as worker:
        assert worker.wait() == 0
    made.result()


def test_files_take_no_workers_of_other_hosts(source: Path, volume: str) -> None:
    made = Import(volume, source, listen=HERE)
    failure = run_worker(move(Invitation.read(made.file)))
    assert isinstance(failure, UsageError)
    assert re.search("expected a process of the coordinator's host that it can kill", str(failure))
    finish(made)


def test_an_import_of_this_host_has_no_address_for_others(source: Path, volume: str) -> None:
    made = Import(volume, source)
    with pytest.raises(UsageError, match=r"on the coordinator's host, .*another host"):
        run_worker(move(Invitation.read(made.file)))
    finish(made)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda i: dataclasses.replace(i, secret="00" * 32), CannotJoinError, "join an import"),
        (
            lambda i: dataclasses.replace(i, fingerprint="00" * 32),
            UsageError,
            "another certificate",
        ),
    ],
)
def test_strangers_are_not_admitted(
    source: Path,
    nvme: str,
    change: Callable[[Invitation], Invitation],
    error: type[DlfsError],
    text: str,
) -> None:
    made = Import(nvme, source, listen=HERE)
    with pytest.raises(error, match=text):
        run_worker(change(move(Invitation.read(made.file))))
    finish(made)


def test_the_error_of_the_import_reaches_its_workers(source: Path, volume: str) -> None:
    made = Import(volume, source)
    (source / "3" / "010").unlink()
    with start_worker(made.file) as first, start_worker(made.file) as second:
        outputs = [each.communicate()[0] for each in (first, second)]
    with pytest.raises(DlfsError, match="010"):
        made.result()
    assert first.returncode
    assert second.returncode
    assert any("010" in output for output in outputs), outputs


def test_a_killed_worker_is_replaced_by_another(source: Path, volume: str) -> None:
    made = Import(volume, source)
    with start_worker(made.file) as first:
        first.send_signal(signal.SIGSTOP)  # it has not joined, or is amid a part
        with start_worker(made.file) as second:
            first.kill()
            assert second.wait() == 0
    made.result()


def test_no_import_in_time(tmp_path: Path) -> None:
    with start_worker(str(tmp_path / "none"), "--wait", "0") as worker:
        output, _ = worker.communicate()
    assert worker.returncode == ExitCode.NOT_FOUND
    assert f"{tmp_path}/none: there is no such file" in output


def test_an_import_that_was_killed(tmp_path: Path) -> None:
    """Its file is left; the worker waits for an import that goes on, and the file is replaced."""
    file = str(tmp_path / "join")
    Invitation("dlfs-import-none", "", "127.0.0.1", 1, "00" * 32, "00" * 32).write(file)
    with pytest.raises(CannotJoinError, match=r"connect to 127\.0\.0\.1:1: Connection refused"):
        join_import(file, wait_s=0, say=print)
    other = Invitation("dlfs-import-other", "")
    other.write(file)
    assert Invitation.read(file) == other


def test_a_worker_that_comes_late(source: Path, volume: str) -> None:
    made = Import(volume, source)
    finish(made)
    assert os.stat(made.file).st_mode & 0o777 == 0o600
    join_import(made.file, wait_s=0, say=print)
    Invitation("name", "").write(made.file)
    Invitation("name", "").end(made.file, UsageError("no such name\nat all"))
    with pytest.raises(UsageError, match=r"^no such name at all$"):
        join_import(made.file, wait_s=0, say=print)
    clear_ended(made.file)
    assert not os.path.exists(made.file)


def test_an_import_that_ends_before_workers_can_join(tmp_path: Path, volume: str) -> None:
    (tmp_path / "empty").mkdir()
    file = str(tmp_path / "join")
    command = [sys.executable, "-m", "dlfs.cli", "import", str(tmp_path / "empty"), volume]
    command += ["--name", "x", "--join-file", file]
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode
    with pytest.raises(NotFoundError, match="at least one sample"):
        join_import(file, wait_s=0, say=print)
    assert subprocess.run([*command, "--allow-empty", "--quiet"], check=False).returncode == 0
    join_import(file, wait_s=0, say=print)


def test_a_worker_without_room_joins_again_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "join")
    invitation = Invitation("name", "")
    invitation.write(file)
    said: list[str] = []
    joined: list[Invitation] = []

    def run(found: Invitation, **_options: object) -> None:
        joined.append(found)
        if len(joined) == 2:
            invitation.end(file, SpaceError("no room at all"))
        raise NotNeededError("no room")

    monkeypatch.setattr(joining, "run_worker", run)
    monkeypatch.setattr(joining, "REJOIN_S", 0.0)
    monkeypatch.setattr(joining, "RETRY_S", 0.0)
    with pytest.raises(SpaceError, match="no room at all"):
        join_import(file, wait_s=100, say=said.append)
    assert joined == 2 * [invitation]
    assert said == 2 * ["no room; joining again later"]


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "join"
    file.write_text("my thesis")
    with pytest.raises(ExistsError, match="expected no file, or one of an earlier import"):
        Invitation("name", "").write(str(file))
    assert file.read_text() == "my thesis"


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "join"
    Invitation("name", "").write(str(file))
    file.chmod(0o644)
    with pytest.raises(UsageError, match="mode 0600, got mode 0644"):
        Invitation.read(str(file))
    with pytest.raises(NotFoundError, match="there is no such file"):
        Invitation.read(str(tmp_path / "none"))


@pytest.mark.parametrize("text", ["", "dlfs-import", "dlfs-import a b c d e f", "x y z", "unix a"])
def test_what_is_no_invitation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected an invitation"):
        Invitation.parse(text)
