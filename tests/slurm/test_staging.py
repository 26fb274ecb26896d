"""Staging by Slurm itself, through burst_buffer.lua: before a job, by the rights of its user."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PATH, Cluster
from tests.slurm.lab import ROOT, USERS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.fuse, pytest.mark.timeout(300)]

STORAGE = "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12"
LIST = "#!/bin/bash\n{directives}\nsrun bash -c 'dlfs ls \"$DLFS_SERVICE\" | sort'\n"


class StagingCluster(Cluster):
    """A lab whose slurmctld has burst_buffer.lua."""

    def prepare(self) -> None:
        super().prepare()
        script = (ROOT / "deploy" / "slurm" / "burst_buffer.lua").read_text()
        for written, here in ((STORAGE, self.volume), ("/opt/dlfs/bin:/usr/sbin", PATH)):
            assert written in script
            script = script.replace(written, here)
        (self.folder / "burst_buffer.lua").write_text(script)
        (self.folder / "burst_buffer.conf").write_text("Directive=DLFS\nFlags=TeardownFailure\n")

    def source(self, name: str, user: str) -> Path:
        """Make a folder that only a user can read."""
        folder = self.shared / name
        folder.mkdir(mode=0o700)
        (folder / "0.bin").write_bytes(bytes(1000))
        for path in (folder, folder / "0.bin"):
            self.head.run("chown", str(USERS[user]), str(path))
        return folder

    def submit_staged(self, *orders: str, user: str = "ann") -> int:
        """Submit a job that lists the datasets after it has staged in."""
        directives = "\n".join(f"#DLFS stage_in {order}" for order in orders)
        return self.submit(LIST.format(directives=directives), user=user)

    def output(self, job: int) -> list[str]:
        """What a job has printed."""
        return (self.shared / f"slurm-{job}.out").read_text().split()

    def datasets(self) -> str:
        """The datasets of the volume, and its unfinished imports."""
        return self.head.run("dlfs", "info", self.volume)

    def wait_for_removal(self, name: str) -> None:
        """Wait until the volume does not have a dataset any more."""
        wait_for(lambda: name not in self.datasets(), f"{name} to be removed")

    def wait_for_reason(self, job: int, reason: str) -> None:
        """Wait until a job is held for a reason."""

        def is_held() -> bool:
            shown = self.head.run("squeue", "--noheader", "--format=%T %r", f"--job={job}")
            return "PENDING" in shown and reason in shown

        try:
            wait_for(is_held, f"job {job} to be held")
        except AssertionError as error:
            error.add_note(f"{self.job(job)}\n{self.head.log[-3000:]}")
            raise


@pytest.fixture(scope="module")
def cluster() -> Iterator[StagingCluster]:
    settings = "BurstBufferType=burst_buffer/lua\nDebugFlags=BurstBuffer\n"
    with StagingCluster(nodes=1, settings=settings, datasets=False) as cluster:
        yield cluster


def test_datasets_are_there_when_the_job_begins_and_given_back(cluster: StagingCluster) -> None:
    source = cluster.source("photos", "ann")
    orders = (f"source={source} name=photos", f"source={source} name=today-%j remove=yes")
    for _ in range(2):  # the second job finds one of them
        job = cluster.submit_staged(*orders)
        cluster.wait_for_state(job, "COMPLETED")
        assert cluster.output(job) == ["photos@1", f"today-{job}@1"]
        cluster.wait_for_removal(f"today-{job}")
        cluster.wait_until_clean()


def test_a_job_that_starts_again_stages_in_again(cluster: StagingCluster) -> None:
    source = cluster.source("again", "ann")
    wait = '[ -n "$SLURM_RESTART_COUNT" ] || { echo >started; sleep 1000; }'
    directive = f"#DLFS stage_in source={source} name=again-%j remove=yes"
    job = cluster.submit(LIST.format(directives=f"{directive}\n{wait}"), user="ann")
    cluster.wait_for_files("started")
    cluster.head.run("scontrol", "requeue", str(job))
    cluster.wait_for_state(job, "COMPLETED")
    assert f"again-{job}@2" in cluster.output(job)  # the first one was removed
    cluster.wait_for_removal(f"again-{job}")
    cluster.wait_until_clean()


def test_a_job_reads_what_its_user_may_read(cluster: StagingCluster) -> None:
    source = cluster.source("private", "bob")
    job = cluster.submit_staged(f"source={source} name=private")
    cluster.wait_for_reason(job, "Permission denied")
    assert str(source) in cluster.job(job)["Reason"] + cluster.head.log
    source.chmod(0o755)
    cluster.head.run("scontrol", "release", str(job))
    cluster.wait_for_state(job, "COMPLETED")
    assert "private@1" in cluster.output(job)
    cluster.wait_until_clean()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("source=/data", "expected '#DLFS stage_in source=PATH name=NAME [remove=yes]'"),
        ("source=data name=a", "expected an absolute path as source, got 'data'"),
        ("source=/data name=a remove=yes", "expected %j in the name"),
    ],
)
def test_a_wrong_order_is_refused_at_once(
    cluster: StagingCluster, order: str, message: str
) -> None:
    with pytest.raises(AssertionError) as error:
        cluster.submit_staged(order)
    assert message in str(error.value)


def test_a_job_that_is_cancelled_while_it_stages_in(cluster: StagingCluster) -> None:
    source = cluster.source("early", "ann")
    (target,) = cluster.head.processes("tests.deploy.target")
    cluster.signal(target, signal.SIGSTOP)
    try:
        job = cluster.submit_staged(f"source={source} name=early-%j remove=yes")
        wait_for(lambda: cluster.head.processes("dlfs --quiet"), "the job to stage in")
        (first, *_) = cluster.head.processes("dlfs --quiet")
        cluster.head.run("scancel", str(job))
        wait_for(lambda: first not in cluster.head.processes("dlfs --quiet"), "the staging to end")
    finally:
        cluster.signal(target, signal.SIGCONT)
    cluster.wait_until_clean()
    wait_for(lambda: not cluster.head.processes("dlfs --quiet"), "the rest to be removed")
    assert f"early-{job}" not in cluster.datasets()


def test_a_job_that_waits_for_a_writer_and_is_cancelled_before_it_begins(
    cluster: StagingCluster,
) -> None:
    source = cluster.source("late", "ann")
    other = cluster.submit("#!/bin/bash\nsleep 1000\n", "--exclusive", user="ann")
    cluster.wait_for_state(other, "RUNNING")
    writer = ("import sys, dlfs\n"
              "with dlfs.open(sys.argv[1]) as volume, volume.writer('other') as writer:\n"
              "    print('open', flush=True)\n"
              "    sys.stdin.read()\n")  # fmt: skip
    with cluster.head.start("python", "-c", writer, cluster.volume) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        job = cluster.submit_staged(f"source={source} name=late-%j remove=yes")
        wait_for(lambda: cluster.head.processes("sleep 2"), "the job to wait for the writer")
        process.kill()
    wait_for(lambda: f"late-{job}@1" in cluster.datasets(), "the job to have staged in")
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.head.run("scancel", str(job), str(other))
    cluster.wait_for_removal(f"late-{job}")
    cluster.wait_until_clean()
