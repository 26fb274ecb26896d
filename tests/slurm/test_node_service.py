"""Prolog and epilog: a node service for each user on a node, and nothing left when its jobs end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import RUNTIME, Cluster
from tests.slurm.lab import USERS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.fuse, pytest.mark.timeout(600)]

ODD = "o'dd na.me-$1"
READ = """\
#!/bin/bash
srun --label bash -c '
    dlfs ls -R "$DLFS_SERVICE" photos | wc -l
    cmp "$DLFS_MOUNT/photos/0/0002.jpg" <(dlfs cat "$DLFS_SERVICE" photos 0/0002.jpg) && echo same
    echo ready >"ready.$SLURM_JOB_ID.$SLURM_PROCID"'
"""
HOLD = READ + "sleep 1000\n"
BUSY = """\
#!/bin/bash
exec 8<"$DLFS_MOUNT/photos/0/0002.jpg"
trap '' TERM
echo ready >ready.$SLURM_JOB_ID.0
while :; do read -r -N 1 -u 8 _ || sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, users={**USERS, ODD: 41003}) as cluster:
        yield cluster


def start(cluster: Cluster, script: str, *options: str, user: str = "ann", tasks: int = 1) -> int:
    """Submit a job and wait until it reads."""
    job = cluster.submit(script, f"--ntasks={tasks}", *options, user=user)
    cluster.wait_for_state(job, "RUNNING")
    cluster.wait_for_files(*(f"ready.{job}.{number}" for number in range(tasks)))
    return job


def services(cluster: Cluster, node: str) -> list[int]:
    """Return the IDs of the services on a node."""
    return list(cluster.nodes[node].processes("dlfs.service.daemon"))


def test_a_job_reads_on_two_nodes(cluster: Cluster) -> None:
    job = cluster.submit(READ, "--nodes=2", "--ntasks-per-node=1", user="ann")
    cluster.wait_for_state(job, "COMPLETED")
    shown = (cluster.shared / f"slurm-{job}.out").read_text().splitlines()
    assert sorted(shown) == ["0: 600", "0: same", "1: 600", "1: same"]
    cluster.wait_until_clean()


@pytest.mark.parametrize("end", ["scancel", "time-out"])
def test_a_job_that_is_ended(cluster: Cluster, end: str) -> None:
    job = start(cluster, BUSY)
    if end == "scancel":
        cluster.head.run("scancel", str(job))
    else:
        cluster.head.run("scontrol", "update", f"jobid={job}", "timelimit=0:01")
    cluster.wait_until_clean()


def test_jobs_of_a_user_share_a_service_and_users_do_not(cluster: Cluster) -> None:
    where = "--nodelist=n1"
    first = start(cluster, HOLD, where)
    (service,) = services(cluster, "n1")
    second = start(cluster, HOLD, where)
    assert services(cluster, "n1") == [service]
    third = start(cluster, HOLD, where, user="bob")
    other = set(services(cluster, "n1")) - {service}
    assert {os.stat(f"/proc/{pid}").st_uid for pid in other} == {USERS["bob"]}
    code, shown = cluster.nodes["n1"].try_run(
        "dlfs", "ls", f"unix:{RUNTIME}/{USERS['ann']}/node/socket", user="bob"
    )
    assert code != 0
    assert "Permission denied" in shown
    cluster.head.run("scancel", str(first))
    wait_for(lambda: cluster.job(first)["JobState"] == "CANCELLED", "its end")
    cluster.head.run("scancel", str(third))
    wait_for(lambda: services(cluster, "n1") == [service], "the service of bob to end")
    at_once = start(cluster, HOLD, where)
    cluster.head.run("scancel", str(second), str(at_once))
    cluster.wait_until_clean()


def test_a_stopped_job_keeps_its_service(cluster: Cluster) -> None:
    job = start(cluster, HOLD, "--nodelist=n1")
    (service,) = services(cluster, "n1")
    cluster.head.run("scancel", "--signal=STOP", str(job))
    wait_for(lambda: cluster.job(job)["JobState"] == "STOPPED", "the job to be stopped")
    other = cluster.submit(READ, "--nodelist=n1", user="ann")
    cluster.wait_for_state(other, "COMPLETED")
    assert services(cluster, "n1") == [service]
    cluster.head.run("scancel", str(job))
    cluster.wait_until_clean()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_service_that_hangs_or_was_killed(cluster: Cluster, number: signal.Signals) -> None:
    cluster.configure(cluster.nodes["n1"], STOP_SECONDS="1")
    job = start(cluster, BUSY, "--nodelist=n1")
    (service,) = services(cluster, "n1")
    cluster.signal(service, number)
    cluster.head.run("scancel", str(job))
    cluster.wait_until_clean()


def test_an_odd_name_and_arrays(cluster: Cluster) -> None:
    job = cluster.submit(READ, "--array=1-3", user=ODD)
    assert cluster.job(job)["UserId"].startswith("o'dd")
    cluster.wait_until_clean()
    shown = sorted(path.name for path in cluster.shared.glob(f"slurm-{job}_*.out"))
    assert shown == [f"slurm-{job}_{number}.out" for number in (1, 2, 3)]
    for name in shown:
        assert (cluster.shared / name).read_text().splitlines() == ["0: 600", "0: same"]


def test_without_storage_the_job_is_told(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        cluster.configure(node, VOLUME="/nowhere.img")
    try:
        job = cluster.submit("#!/bin/bash\nsrun sh -c 'echo \"<$DLFS_SERVICE>\"'\n", user="ann")
        cluster.wait_for_state(job, "COMPLETED")
    finally:
        for node in cluster.nodes.values():
            cluster.configure(node)
    shown = (cluster.shared / f"slurm-{job}.out").read_text()
    assert "no node service on n1: dlfs: " in shown
    assert "/nowhere.img" in shown
    assert "<>" in shown
    cluster.wait_until_clean()


def test_hooks_run_with_the_jobs_environment(cluster: Cluster) -> None:
    for kind in ("prolog.d", "epilog.d"):
        (cluster.scripts / kind).mkdir()
        hook = cluster.scripts / kind / "10-note"
        hook.write_text(f'#!/bin/sh\necho "$SLURM_JOB_ID" >>{cluster.shared}/{kind}\n')
        hook.chmod(0o755)
    try:
        job = cluster.submit(READ, user="ann")
        cluster.wait_for_state(job, "COMPLETED")
        cluster.wait_until_clean()
    finally:
        for kind in ("prolog.d", "epilog.d"):
            (cluster.scripts / kind / "10-note").unlink()
    assert (cluster.shared / "prolog.d").read_text() == f"{job}\n"
    assert (cluster.shared / "epilog.d").read_text() == f"{job}\n"


def test_components_of_a_heterogeneous_job(cluster: Cluster) -> None:
    """Slurm gives each component nodes of its own, and a job ID, by which it is cancelled."""
    script = HOLD.replace("srun ", "srun --het-group=0-1 ")
    first = cluster.submit(script, "--nodelist=n1", ":", "--nodelist=n2", user="ann")
    cluster.wait_for_files(f"ready.{first}.0", f"ready.{first}.1")
    (here,), (there,) = services(cluster, "n1"), services(cluster, "n2")
    other = start(cluster, HOLD, "--nodelist=n2")
    assert services(cluster, "n2") == [there]
    cluster.head.run("scancel", f"{first}+1")
    mark = f"{RUNTIME}/{USERS['ann']}/jobs/{first + 1}"
    wait_for(lambda: cluster.nodes["n2"].try_run("test", "-e", mark)[0], "its epilog")
    assert services(cluster, "n1") == [here]
    assert services(cluster, "n2") == [there]
    cluster.head.run("scancel", str(other))
    wait_for(lambda: not services(cluster, "n2"), "the service of n2 to end")
    assert services(cluster, "n1") == [here]
    cluster.head.run("scancel", str(first))
    cluster.wait_until_clean()
