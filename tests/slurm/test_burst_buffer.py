"""Burst buffers of the nodes of a job: three nodes with SPDK's target, and what they lose."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlfs.fabric.keys import generate_key
from tests.slurm import training
from tests.slurm.lab import ROOT, Machine, SlurmLab
from tests.spdk.target import program
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.spdk, pytest.mark.timeout(300)]

SCRIPT = ROOT / "deploy/slurm/burst-buffer"
SETTINGS = """\
Prolog={folder}/prolog
Epilog={folder}/epilog
TaskProlog={folder}/task-prolog
PrologFlags=Alloc
GresTypes=burst
"""
CONF = """\
PATH={path}
export PATH LD_LIBRARY_PATH='{libraries}' PYTHONPATH={root}
KEY={folder}/key
STORE={folder}/scratch-$SLURMD_NODENAME/burst
NVMF_TGT="{program} ${{NVMF_TGT#* }}"
WAIT_S=40
"""
JOB = """\
#!/bin/bash
volume=$($BURST format) || exit 1
if ! dlfs info "$volume" photos >/dev/null 2>&1; then
    dlfs import $FOLDER/source "$volume" --name photos || exit 1
fi
for _ in 1 2 3 4 5 6 7 8 9; do
    export ATTEMPT=$(ls $FOLDER/log | sed -nE 's/^([0-9]+)\\..*/\\1/p' | sort -u | wc -l)
    nodes=$(scontrol show job -o $SLURM_JOB_ID |
        sed -nE "s/^JobId=$SLURM_JOB_ID .* NodeList=([^ ]*).*/\\1/p")
    count=$(scontrol show hostnames $nodes | wc -l)
    # With --no-kill, srun returns 0 although a node was lost, and Slurm counts the step as running.
    srun --overlap -w $nodes -N $count -n $count \\
        python -m tests.slurm.training $FOLDER/log
    [ $(ls $FOLDER/log/done.$ATTEMPT.* | wc -l) != $count ] || exit 0
    sleep 1
done
exit 1
"""
STAGED_TWICE = """\
#!/bin/bash
set -e
volume=$($BURST format)
dlfs import $FOLDER/source "$volume" --name photos --step 256KiB &
sleep 1
kill -9 $! || true
dlfs info "$volume" photos || dlfs import $FOLDER/source "$volume" --name photos --step 256KiB
dlfs verify "$volume"
"""


class Cluster:
    """Three nodes whose prolog and epilog have burst buffers."""

    def __init__(self, lab: SlurmLab) -> None:
        self.lab = lab
        self.conf = lab.folder / "burst.conf"
        self.folder = lab.shared / "job"
        self.log = self.folder / "log"
        text = CONF.format(
            path=f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            libraries=os.environ.get("LD_LIBRARY_PATH", ""),
            root=ROOT,
            folder=lab.folder,
            program=program(),
        )
        self.conf.write_text(text)
        (lab.folder / "key").touch(0o600)
        (lab.folder / "key").write_text(generate_key())
        said = f">>{lab.folder}/log/burst-$SLURMD_NODENAME 2>&1"
        for name, action in (
            ("prolog", f"{SCRIPT} start {said} || true"),
            ("epilog", f"exec {SCRIPT} stop {said}"),
            ("task-prolog", f"exec {SCRIPT} env"),
        ):
            path = lab.folder / name
            path.write_text(f"#!/bin/sh\nexport DLFS_BURST_CONF={self.conf}\n{action}\n")
            path.chmod(0o755)

    def submit(self, *options: str) -> int:
        """Submit the job of a user on all nodes, with 64 MiB of each node's disk."""
        for path in (self.folder, self.log):
            path.mkdir()
            path.chmod(0o777)
        training.write_source(self.folder / "source")
        return self.submit_again("-N3", "--gres=burst:64M", *options, script=JOB)

    def submit_again(self, *options: str, script: str) -> int:
        """Submit another job, with the source that ``submit`` has written."""
        exports = f"ALL,FOLDER={self.folder},BURST={SCRIPT},DLFS_BURST_CONF={self.conf}"
        output = self.folder / "output"
        return self.lab.submit(
            script, f"--export={exports}", f"--output={output}", "--open-mode=append", *options,
            user="ann",
        )  # fmt: skip

    @property
    def output(self) -> str:
        """What the job and the burst buffers have said."""
        logs = [self.folder / "output", *sorted((self.lab.folder / "log").glob("burst-*"))]
        return "\n".join(path.read_text() for path in logs if path.exists())

    def wait_until_paused(self) -> None:
        """Wait until all ranks are in mid-epoch."""
        paused = [self.log / f"paused.{rank}" for rank in range(3)]
        try:
            wait_for(lambda: all(path.exists() for path in paused), "the middle of the epoch")
        except AssertionError as error:
            error.add_note(self.output)
            raise

    def finish(self, job: int, lost: Machine | None = None) -> None:
        """Let the ranks go on; wait for the end of the job; check what it read, and what is left.

        Args:
            job: its ID.
            lost: node that has no power.
        """
        (self.log / "go").touch()
        self.wait_for_state(job, "COMPLETED")
        paths = training.trained(self.log)
        assert sorted(paths) == [f"{number:04}" for number in range(training.SAMPLES)], self.output
        for node in self.lab.nodes.values():
            if node is not lost:
                self.wait_until_clean(node)

    def wait_for_state(self, job: int, state: str) -> None:
        try:
            self.lab.wait_for_state(job, state)
        except AssertionError as error:
            error.add_note(self.output)
            raise

    def wait_until_clean(self, node: Machine) -> None:
        """Wait until a node has nothing of a burst buffer: processes, files, sockets, memory."""

        # Memory of readers, in /dev/shm/dlfs-UID, is for the epilog of the node service.
        places = f"/run/dlfs/burst-buffer {node.scratch}/burst* /dev/shm /var/run/dpdk"
        command = f"find {places} -mindepth 1 ! -path '/dev/shm/dlfs-*' 2>/dev/null; ss -Hltn"
        found: list[str] = []

        def is_clean() -> bool:
            lines = node.run("sh", "-c", command).splitlines()
            found[:] = [line for line in lines if ":6818" not in line]  # the port of slurmd
            found.extend(node.processes("rpc.sock", "tests.slurm.training").values())
            return not found

        try:
            wait_for(is_clean, f"{node.name} to be clean")
        except AssertionError as error:
            error.add_note("\n".join(found))
            raise


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with SlurmLab(nodes=3, settings=SETTINGS, node_options="Gres=burst:1G") as lab:
        yield Cluster(lab)


def test_a_node_that_loses_power_ends_neither_job_nor_data(cluster: Cluster) -> None:
    job = cluster.submit("--no-kill")
    cluster.wait_until_paused()
    lost = cluster.lab.nodes["n2"]
    lost.crash()
    cluster.finish(job, lost)
    assert len(training.attempts(cluster.log)) == 2
    assert any(lost.scratch.glob("burst/*/*"))
    lost.boot()
    cluster.lab.head.run("srun", "-w", "n2", "--gres=burst:1M", "true", user="ann")
    cluster.wait_until_clean(lost)


def test_a_job_that_is_requeued_stages_again_and_goes_on(cluster: Cluster) -> None:
    job = cluster.submit("--requeue", "--nodes=2-3")
    cluster.wait_until_paused()
    lost = cluster.lab.nodes["n1"]  # the first node, which runs the script of the job
    lost.crash()
    cluster.finish(job, lost)
    first, second = training.attempts(cluster.log)
    assert (len(first), len(second)) == (3, 2)
    lost.boot()


def test_a_target_that_hangs_is_read_around_and_killed(cluster: Cluster) -> None:
    job = cluster.submit()
    cluster.wait_until_paused()
    (target,) = cluster.lab.nodes["n2"].processes("rpc.sock")
    os.kill(target, signal.SIGSTOP)
    cluster.finish(job)
    assert len(training.attempts(cluster.log)) == 1


def test_a_disk_without_room_is_an_error_of_the_job(cluster: Cluster) -> None:
    """Also: two jobs on one node, a job and one of an array, whose staging is killed."""
    with cluster.conf.open("a") as conf:
        conf.write("WAIT_S=8\n")
    full = cluster.lab.nodes["n2"]
    full.run("mkdir", str(full.scratch / "burst"))
    full.run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(full.scratch / "burst"))
    job = cluster.submit()
    cluster.lab.wait_for_state(job, "FAILED")
    assert "n2: dlfs: compose" in cluster.output
    assert "No space left on device" in cluster.output
    for node in cluster.lab.nodes.values():
        cluster.wait_until_clean(node)
    assert cluster.lab.idle() == 3
    options = ("-N1", "-w", "n1", "--gres=burst:32M")
    small = cluster.submit_again(*options, script=STAGED_TWICE)
    array = cluster.submit_again(*options, "--array=0-1", script=STAGED_TWICE)
    for job in (small, array, array + 1):  # Slurm gives a job of an array its ID when it starts
        cluster.wait_for_state(job, "COMPLETED")
    cluster.wait_until_clean(cluster.lab.nodes["n1"])
