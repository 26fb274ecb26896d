"""Imports whose workers are tasks of Ray: equal to others, whatever ends the tasks.

``DLFS_IMPORT_FILES`` is the number of files (2000 by default).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

import dlfs
from dlfs.cli.exits import ExitCode
from dlfs.ingest.workers.coordinator import LOSSES_MAX
from tests.ray.cluster import RayCluster
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

FILES = int(os.environ.get("DLFS_IMPORT_FILES", "2000"))
NQN = "nqn.2024-01.org.example:storage"
STEP = f"{FILES // 30}KiB"
VOLUME_BYTES = (64 << 20) + FILES * 4096


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as made:
        yield made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("source")
    for number in range(FILES):
        path = folder / str(number % 7) / f"{number:05}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(number.to_bytes(4, "little") * (1 + number * 37 % 900))
    return folder


@pytest.fixture
def volume(tmp_path: Path, source: Path) -> str:
    """A volume with the dataset ``plain``, which was imported without workers."""
    made = str(new_volume(tmp_path / "disk", size_bytes=VOLUME_BYTES))
    run_import(source, made, "plain")
    return made


def start_import(
    source: Path, volume: str, name: str, *options: str, cluster: RayCluster | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dlfs.cli", "import", source, volume, "--name", name,
         "--step", STEP, *options],
        env=os.environ if cluster is None else cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def run_import(
    source: Path, volume: str, name: str, *options: str, cluster: RayCluster | None = None
) -> tuple[int, str]:
    with start_import(source, volume, name, *options, cluster=cluster) as process:
        output, _ = process.communicate()
    return process.returncode, output


def check_equal(volume: str, *names: str) -> None:
    """Check that datasets have the same samples in the same order of packing, and all is sound."""
    contents = []
    with dlfs.open(volume) as opened:
        assert not opened.unfinished()
        for name in names:
            with opened[name] as dataset:
                contents.append((list(dataset.paths()), dataset[:].to_list()))
    assert all(each == contents[0] for each in contents)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    disk = tmp_path / "disk"
    disk.touch()
    os.truncate(disk, VOLUME_BYTES)
    namespace = Namespace(VOLUME_BYTES, path=disk, identity=uuid4())
    with ScriptedTarget([Subsystem(NQN, [namespace])]) as made:
        uri = f"nvme-tcp://127.0.0.1:{made.port}/{NQN}?nsid=1"
        dlfs.format_volume(uri)
        yield uri


@pytest.mark.parametrize("options", ["?workers=2", "?workers=2&cpus=0.5", ""])
def test_files(cluster: RayCluster, source: Path, volume: str, options: str) -> None:
    """A volume on files takes workers of this host."""
    for address in (cluster.address, cluster.client.removeprefix("ray:")):
        name = f"by{len(address)}"
        code, output = run_import(
            source, volume, name, "--workers", f"ray:{address}{options}", cluster=cluster
        )
        assert code == 0, output
        check_equal(volume, "plain", name)
    wait_for(lambda: not cluster.workers(), "the end of the tasks")


def test_nvme(cluster: RayCluster, source: Path, target: str) -> None:
    assert run_import(source, target, "plain")[0] == 0
    assert run_import(source, target, "processes", "--workers", "2")[0] == 0
    workers = f"ray:{cluster.address}?workers=2"
    code, output = run_import(source, target, "ray", "--workers", workers, cluster=cluster)
    assert code == 0, output
    check_equal(target, "plain", "processes", "ray")


def test_a_worker_is_killed_again_and_again(cluster: RayCluster, source: Path, volume: str) -> None:
    workers = f"ray:{cluster.address}?workers=2"
    killed = 0
    with start_import(source, volume, "killed", "--workers", workers, cluster=cluster) as process:
        while process.poll() is None and killed < 5:
            for pid in [*cluster.workers()][:1]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            time.sleep(1)  # between two kills
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert killed
    check_equal(volume, "plain", "killed")


def test_three_workers_are_killed_at_once_again_and_again(
    cluster: RayCluster, source: Path, tmp_path: Path
) -> None:
    volume = str(new_volume(tmp_path / "disk", size_bytes=VOLUME_BYTES, chunk_bytes=64 << 10))
    workers = f"ray:{cluster.address}?workers=3"
    killed: set[int] = set()
    with start_import(source, volume, "killed", "--workers", workers, cluster=cluster) as process:
        for _ in range(LOSSES_MAX - 1):
            wait_for(lambda: len(cluster.workers()) >= 3 or process.poll() is not None, "all tasks")
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGSTOP)  # it learns of their end when all have ended
            killed.update(cluster.workers())
            for pid in cluster.workers():
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not killed & {*cluster.workers()}, "their end")
            process.send_signal(signal.SIGCONT)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert len(killed) >= 3
    run_import(source, volume, "plain")
    check_equal(volume, "plain", "killed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_coordinator_ends(
    cluster: RayCluster, source: Path, volume: str, number: signal.Signals
) -> None:
    """Its tasks end as well, and the same command goes on."""
    workers = f"ray:{cluster.address}?workers=2"
    with start_import(source, volume, "x", "--workers", workers, cluster=cluster) as process:
        wait_for(cluster.workers, "the tasks")
        process.send_signal(number)
        process.communicate()
    assert process.returncode in (-signal.SIGKILL, ExitCode.INTERRUPTED)
    wait_for(lambda: not cluster.workers(), "the end of the tasks")
    code, output = run_import(source, volume, "x", "--workers", workers, cluster=cluster)
    assert code == 0, output
    check_equal(volume, "plain", "x")


def test_errors_of_ray_reach_the_user(cluster: RayCluster, source: Path, volume: str) -> None:
    cases: dict[str, Sequence[str]] = {
        "ray:127.0.0.1:1": ("connect to 127.0.0.1:1", "refused"),
        f"ray:{cluster.address}?resource=gold:1": ("expected a node with 1 CPU, 1 gold",),
    }
    for workers, texts in cases.items():
        code, output = run_import(source, volume, "x", "--workers", workers, cluster=cluster)
        assert code == ExitCode.DEVICE, output
        assert all(text in output for text in texts), output
