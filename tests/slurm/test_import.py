"""Imports by workers that Slurm starts on the nodes of a cluster.

``DLFS_IMPORT_FILES`` is the number of files (12,000 by default), of 20 MiB in all.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import dlfs
from dlfs.cli.exits import ExitCode
from tests.slurm.cluster import Cluster
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

FILES = int(os.environ.get("DLFS_IMPORT_FILES", "12000"))
WORDS_MAX = 900 * 12000 // FILES
"""Words of four bytes that a file has at most."""
STEP = "16KiB"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, prolog=False, datasets=False) as cluster:
        for number in range(FILES):
            path = cluster.shared / "photos" / str(number % 7) / f"{number:05}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(number.to_bytes(4, "little") * (1 + number * 37 % WORDS_MAX))
        run_import(cluster, "plain")
        yield cluster


def words(cluster: Cluster, name: str, *options: str, volume: str | None = None) -> list[str]:
    source = str(cluster.shared / "photos")
    return ["dlfs", "--quiet", "import", source, volume or cluster.volume, "--name", name,
            "--step", STEP, *options]  # fmt: skip


def run_import(cluster: Cluster, name: str, *options: str, volume: str | None = None) -> None:
    cluster.head.run(*words(cluster, name, *options, volume=volume), user="ann")


@contextmanager
def join(cluster: Cluster, file: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run workers on the nodes; end them if the block raises, as nobody waits for them then."""
    words = "srun", *options, "dlfs", "import-worker", str(file)
    with cluster.head.start(*words, user="ann") as workers:
        try:
            yield workers
        except BaseException:
            workers.terminate()
            raise


def check_equal(cluster: Cluster, *names: str, volume: str | None = None) -> None:
    """Check that datasets are equal to ``plain``, and remove them: the volume has room for one."""
    for name in names:
        cluster.head.run(sys.executable, "-c", COMPARE, volume or cluster.volume, name, user="ann")


COMPARE = """
import sys, dlfs
with dlfs.open(sys.argv[1]) as volume:
    with volume["plain"] as a, volume[sys.argv[2]] as b:
        assert not volume.unfinished()
        assert list(a.paths()) == list(b.paths())
        assert a[:].to_list() == b[:].to_list()
    volume.remove(sys.argv[2])
"""


def test_both_nodes(cluster: Cluster) -> None:
    file = cluster.home("ann") / "both"
    with join(cluster, file, "-N", "2", "-n", "4", "--label") as workers:
        # It waits for the coordinator.
        run_import(cluster, "both", "--join-file", str(file))
        output, _ = workers.communicate(timeout=60)
    assert workers.returncode == 0, output
    check_equal(cluster, "both")


def test_a_node_is_lost(cluster: Cluster) -> None:
    """Its parts go on on the other one."""
    file = cluster.home("ann") / "lost"
    node = cluster.nodes["n2"]
    with (
        cluster.head.start(*words(cluster, "lost", "--join-file", str(file)), user="ann") as head,
        join(cluster, file, "-w", "n2", "-n", "2") as lost,
    ):
        try:
            wait_for(lambda: _has_steps(cluster, "lost") or head.poll() is not None, "steps")
            assert head.poll() is None, "the import was too fast for this test"
            node.crash()
            with join(cluster, file, "-w", "n1", "-n", "2") as others:
                output, _ = head.communicate(timeout=200)
                assert head.returncode == 0, output
                others.communicate(timeout=60)
                assert others.returncode == 0
        finally:
            lost.kill()
            head.kill()
    check_equal(cluster, "lost")
    wait_for(lambda: cluster.state_of(node).startswith("down"), "n2 to be down")
    node.boot()
    wait_for(lambda: cluster.idle() == 2, "both nodes")


def _has_steps(cluster: Cluster, name: str) -> bool:
    with suppress(dlfs.DlfsError), dlfs.open(str(cluster.folder / "disk")) as volume:
        return any(info.name == name and info.sample_count for info in volume.unfinished())
    return False


def test_the_coordinator_is_killed(cluster: Cluster) -> None:
    """Its workers wait, and join the one that goes on."""
    file = cluster.home("ann") / "killed"
    with join(cluster, file, "-N", "2", "-n", "2") as workers:
        with cluster.head.start(
            *words(cluster, "killed", "--join-file", str(file)), user="ann"
        ) as head:
            wait_for(lambda: head.poll() is not None or _has_steps(cluster, "killed"), "steps")
            for pid in cluster.head.processes("dlfs --quiet import"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            head.communicate()
        run_import(cluster, "killed", "--join-file", str(file))
        output, _ = workers.communicate(timeout=60)
    assert workers.returncode == 0, output
    check_equal(cluster, "killed")


def test_files_take_workers_of_one_host(cluster: Cluster) -> None:
    """Others are refused, and say why."""
    file = cluster.home("ann") / "files"
    volume = cluster.home("ann") / "disk"
    node = cluster.nodes["n1"]
    node.run("dlfs", "format", str(volume), "--size", "64MiB", user="ann")
    run_import(cluster, "plain", volume=str(volume))
    importing = words(cluster, "here", "--join-file", str(file), volume=str(volume))
    importing += ["--listen", cluster.nodes["n1"].address]
    script = f"""
        if [ "$SLURM_PROCID" = 0 ]; then {shlex.join(importing)} & fi
        dlfs import-worker {file} && wait $!
    """
    with cluster.head.start("srun", "-N", "2", "-n", "2", "sh", "-c", script, user="ann") as job:
        output, _ = job.communicate(timeout=100)
    assert "files and disks have no deadline" in output, output
    assert f"task 1: Exited with exit code {ExitCode.USAGE}" in output, output
    assert "task 0: Exited" not in output
    check_equal(cluster, "here", volume=str(volume))


def test_a_batch_job(cluster: Cluster) -> None:
    """The script that docs/slurm.md names."""
    script = str(cluster.scripts / "import.sbatch")
    arguments = words(cluster, "batch")[3:]
    job = cluster.submit(script, "--nodes=2", arguments=arguments, user="ann")
    cluster.wait_for_state(job, "COMPLETED")
    check_equal(cluster, "batch")
