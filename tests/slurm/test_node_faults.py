"""Jobs that end, and nodes that fail, at bad moments: nothing is left, and the reason is said."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import RUNTIME, Cluster
from tests.slurm.lab import USERS, Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.fuse, pytest.mark.timeout(300)]

SHOW = "#!/bin/bash\nsrun sh -c 'echo \"<$DLFS_SERVICE>\"'\n"
TRAIN = """\
#!/bin/bash
cat >train.$SLURM_JOB_ID.py <<'END'
import contextlib, os, pathlib, signal, dlfs
with contextlib.ExitStack() as stack:  # the volume itself, and the service if there is one
    volumes = [stack.enter_context(dlfs.open(os.environ["VOLUME"]))]
    if "DLFS_SERVICE" in os.environ:
        volumes.append(stack.enter_context(dlfs.connect(os.environ["DLFS_SERVICE"])))
    batches = [next(stack.enter_context(volume["photos"]).batches(8)) for volume in volumes]
    pathlib.Path("ready." + os.environ["SLURM_JOB_ID"]).write_text(f"{len(batches)}")
    signal.pause()
END
srun python train.$SLURM_JOB_ID.py
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Machine]:
    """A node whose services have little time to end."""
    node = cluster.nodes["n1"]
    cluster.configure(node, STOP_SECONDS="1")
    yield node
    cluster.configure(node)


def cover(node: Machine, option: str) -> None:
    """Mount an empty /run over that of a node, in which slurmd has open files."""
    node.run("mount", "-t", "tmpfs", "-o", f"mode=755,{option}", "tmpfs", "/run")


def test_a_job_that_is_cancelled_in_its_prolog(cluster: Cluster, node: Machine) -> None:
    cluster.configure(node, START_SECONDS="8", STOP_SECONDS="1")
    (target,) = cluster.head.processes("tests.deploy.target")
    cluster.signal(target, signal.SIGSTOP)
    try:
        job = cluster.submit(SHOW, f"--nodelist={node.name}", user="ann")
        wait_for(lambda: node.processes("dlfs.service.daemon"), "the service to start")
        cluster.head.run("scancel", str(job))
        cluster.wait_until_clean()  # all nodes are idle, so this one is not drained
    finally:
        cluster.signal(target, signal.SIGCONT)
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert not (cluster.shared / f"slurm-{job}.out").exists()


@pytest.mark.parametrize("with_service", [True, False])
def test_trainer_and_service_are_killed(
    cluster: Cluster, node: Machine, with_service: bool
) -> None:
    if not with_service:
        cluster.configure(node, VOLUME="")
    volume = {"VOLUME": cluster.volume}
    job = cluster.submit(TRAIN, f"--nodelist={node.name}", user="ann", environment=volume)
    cluster.wait_for_files(f"ready.{job}")
    assert (cluster.shared / f"ready.{job}").read_text() == ("2" if with_service else "1")
    assert node.run("find", "/dev/shm", "-type", "f", "-name", "*.part")
    for pid in node.processes("dlfs.service.daemon", "python train."):
        cluster.signal(pid, signal.SIGKILL)
    cluster.wait_until_clean()
    assert cluster.job(job)["JobState"] == "FAILED"


def test_a_run_directory_that_is_read_only_drains_the_node(cluster: Cluster, node: Machine) -> None:
    cover(node, "ro")
    try:
        job = cluster.submit(SHOW, f"--nodelist={node.name}", user="ann")
        wait_for(lambda: cluster.state_of(node) == "drained", f"{node.name} to be drained")
    finally:
        node.run("umount", "/run")
    shown = cluster.job(job)
    assert (shown["JobState"], shown["Reason"]) == ("PENDING", "launch_failed_requeued_held")
    assert f"job {job}: cannot make {RUNTIME}/{USERS['ann']}" in node.log
    assert "Read-only file system" in node.log
    cluster.head.run("scontrol", "update", f"nodename={node.name}", "state=resume")
    cluster.head.run("scontrol", "release", str(job))
    cluster.wait_for_state(job, "COMPLETED")
    cluster.wait_until_clean()


def test_a_run_directory_that_is_full_is_said_in_the_job(cluster: Cluster, node: Machine) -> None:
    cover(node, "size=64k")
    try:
        node.run("sh", "-c", "! cat /dev/zero >/run/filler 2>/dev/null")
        job = cluster.submit(SHOW, f"--nodelist={node.name}", user="ann")
        cluster.wait_for_state(job, "COMPLETED")
        wait_for(lambda: cluster.state_of(node) == "idle", f"{node.name} to be idle")
        assert cluster.leftovers(node) == []
    finally:
        node.run("umount", "/run")
    shown = (cluster.shared / f"slurm-{job}.out").read_text()
    assert f"no node service on {node.name}: the reason cannot be written: is /run full?" in shown
    assert "<>" in shown
