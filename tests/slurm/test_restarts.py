"""Jobs whose parts are killed: every sample once over all starts, and nothing left.

``DLFS_SLURM_ROUNDS`` is the number of rounds; ``DLFS_SLURM_SEED=N`` repeats the round of a seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PATH, SAMPLES, Cluster
from tests.slurm.lab import Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.fuse, pytest.mark.timeout(600)]

ENDED = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "BOOT_FAIL"}
SEEDS = [int(os.environ["DLFS_SLURM_SEED"])] if "DLFS_SLURM_SEED" in os.environ else range(
    int(os.environ.get("DLFS_SLURM_ROUNDS", "20"))
)  # fmt: skip


@pytest.fixture(scope="module", params=["prolog", "in the job"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(nodes=2, prolog=request.param == "prolog") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def busy_cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2) as cluster:
        for node in cluster.nodes.values():
            cluster.configure(node, STOP_SECONDS="1")
        yield cluster


class Job:
    """A job of ``each_sample.py``, or of ``train.py`` by torchrun, which restarts by itself."""

    def __init__(self, cluster: Cluster, name: str, *, torch: bool = False) -> None:
        self.cluster = cluster
        self.folder = cluster.home("ann") / name
        scripts = cluster.scripts
        environment = {
            "DLFS_SLURM": str(scripts),
            "DLFS_VOLUME": cluster.volume,
            "DLFS_RESTARTS": "20",
            "PAUSE_S": "0.2" if torch else "0.7",
            "RANKS_PER_NODE": "2",
            # The first task, and srun, would wait longer for tasks whose slurmstepd was killed.
            "WAIT_S": "10",
            "SLURM_WAIT": "20",
            "PATH": PATH,
        }
        program = (
            [str(scripts / "train.py")] if torch else ["python", str(scripts / "each_sample.py")]
        )
        batch = "torchrun.sbatch" if torch else "srun.sbatch"
        self.id = cluster.submit(
            str(scripts / batch),
            f"--output={self.folder}.out",
            user="ann",
            arguments=[*program, "photos", str(self.folder)],
            environment=environment,
        )

    @property
    def output(self) -> str:
        """What the job has printed."""
        path = Path(f"{self.folder}.out")
        return path.read_text() if path.exists() else ""

    def parts(self) -> int:
        """Return the number of files that the tasks have written."""
        return len(list(self.folder.glob("*.*.*.json")))

    def wait_for_end(self) -> None:
        """Wait until the job is complete; fail if it has ended otherwise, and stays so."""
        since = time.monotonic()

        def is_complete() -> bool:
            nonlocal since
            state = self.cluster.job(self.id)["JobState"]
            if state not in ENDED:
                since = time.monotonic()
            assert time.monotonic() - since < 30, f"{state}: {self.output[-3000:]}"
            return state == "COMPLETED"

        try:
            while True:  # each wait is as long as one start may take
                wait_for(is_complete, f"the end of job {self.id}")
                return
        except AssertionError as error:
            error.add_note(self.output[-3000:])
            raise

    def results(self) -> list[int]:
        """Return the indices of the results that count, sorted."""
        shown = self.cluster.head.run(
            "python", str(self.cluster.scripts / "each_sample.py"), str(self.folder),
            user="ann", environment={"PATH": PATH},
        )  # fmt: skip
        return sorted(int(line.split()[0]) for line in shown.splitlines())

    def sizes(self) -> set[int]:
        """Return the numbers of tasks of the starts that wrote parts."""
        parts = self.folder.glob("*.*.*.json")
        return {json.loads(path.read_text())["tasks"] for path in parts}


def test_a_lost_node_and_another_size(cluster: Cluster) -> None:
    job = Job(cluster, "lost")
    wait_for(lambda: job.parts() >= 9, "two parts of all tasks")
    cluster.nodes["n2"].crash()
    job.wait_for_end()
    assert job.results() == list(range(SAMPLES))
    assert job.sizes() == {2, 4}
    cluster.nodes["n2"].boot()
    cluster.wait_until_clean()


@pytest.mark.torch
def test_training_goes_on_at_another_size(cluster: Cluster) -> None:
    """Each sample once in the steps up to the next start's checkpoint, and in the last start."""
    job = Job(cluster, "training", torch=True)
    wait_for(lambda: (job.folder / "checkpoint.pt").exists(), "a checkpoint")
    cluster.nodes["n2"].crash()
    job.wait_for_end()
    orders: dict[int, list[tuple[int, list[int]]]] = {}
    for path in job.folder.glob("order.*"):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        orders.setdefault(int(path.name.split(".")[1]), []).extend(steps)
    starts = sorted(start for start, steps in orders.items() if steps)
    found: list[int] = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        end = None if following is None else min(step for step, _ in orders[following])
        for step, indices in orders[start]:
            if end is None or step < end:
                found += indices
    assert len(starts) == 2, job.output
    assert len(found) == len(set(found))
    assert len(found) > SAMPLES - 4  # the ranks have equal shares
    cluster.nodes["n2"].boot()
    cluster.wait_until_clean()


def test_service_and_tasks_of_a_node_are_killed(cluster: Cluster) -> None:
    job = Job(cluster, "killed")
    wait_for(lambda: job.parts() >= 5, "a part of all tasks")
    for pid, line in cluster.nodes["n1"].processes("dlfs", "each_sample.py").items():
        if "serve" in line or "dlfs.service.daemon" in line or line.startswith("python"):
            cluster.signal(pid, signal.SIGKILL)
    job.wait_for_end()
    assert job.results() == list(range(SAMPLES))
    cluster.wait_until_clean()


@pytest.mark.parametrize("with_tasks", [True, False])
def test_tasks_whose_manager_was_killed(cluster: Cluster, with_tasks: bool) -> None:
    """Nobody tells srun that they have ended."""
    job = Job(cluster, f"unmanaged-{with_tasks}")
    wait_for(lambda: job.parts() >= 5, "a part of all tasks")
    node = cluster.nodes["n2"]
    node.kill_slurmd(with_steps=True)
    if with_tasks:
        for pid, line in node.processes("each_sample.py").items():
            if line.startswith("python"):
                cluster.signal(pid, signal.SIGKILL)
    node.start_slurmd()
    job.wait_for_end()
    assert job.results() == list(range(SAMPLES))
    cluster.wait_until_clean()


HETEROGENEOUS = """\
#!/bin/bash
. {scripts}/job.sh
run_job srun --het-group=0-1 --label bash -c 'dlfs ls -R "$DLFS_SERVICE" photos | wc -l'
"""


def test_a_heterogeneous_job_needs_the_prolog(cluster: Cluster) -> None:
    script = HETEROGENEOUS.format(scripts=cluster.scripts)
    parts = ["--nodelist=n1", ":", "--nodelist=n2"]
    job = cluster.submit(script, *parts, user="ann", environment={"DLFS_VOLUME": cluster.volume})
    cluster.wait_until_clean()
    shown = (cluster.shared / f"slurm-{job}.out").read_text()
    if cluster.has_prolog:
        assert sorted(shown.splitlines()) == [f"0: {SAMPLES}", f"1: {SAMPLES}"]
    else:
        assert "expected services by a prolog, as this job is heterogeneous" in shown
        assert cluster.job(job)["JobState"] == "FAILED"


def kill_service(cluster: Cluster, node: Machine, draw: random.Random) -> None:
    """Kill or stop the service of a node."""
    number = draw.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    for pid in node.processes("dlfs.service.daemon"):
        cluster.signal(pid, number)


def kill_trainer(cluster: Cluster, node: Machine, draw: random.Random) -> None:
    """Kill a task."""
    found = [
        pid for pid, line in node.processes("each_sample.py").items() if line.startswith("python")
    ]
    if found:
        cluster.signal(draw.choice(found), signal.SIGKILL)


def kill_slurmd(cluster: Cluster, node: Machine, draw: random.Random) -> None:
    """Kill slurmd, perhaps with its steps' managers, until Slurm has given the node up or not."""
    node.kill_slurmd(with_steps=draw.random() < 0.5)
    time.sleep(draw.choice([0.5, 12.0]))
    node.start_slurmd()


def crash(cluster: Cluster, node: Machine, draw: random.Random) -> None:
    """Cut the power of a node, until Slurm has noticed: see ``lab``."""
    node.crash()
    wait_for(lambda: "down" in cluster.state_of(node), f"{node.name} to be down")
    node.boot()


def kill_storage(cluster: Cluster, node: Machine, draw: random.Random) -> None:
    """Kill the storage target, and start it again."""
    cluster.kill_target()
    time.sleep(draw.choice([0.0, 3.0]))
    cluster.start_target()


KILLS = [kill_service, kill_trainer, kill_slurmd, crash, kill_storage]


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds(busy_cluster: Cluster, seed: int) -> None:
    """Two kills of random parts, at random moments of a job."""
    cluster = busy_cluster
    draw = random.Random(seed)
    job = Job(cluster, f"round-{seed}")
    for _ in range(2):  # the first rounds are of one kind each
        kill = KILLS[seed % len(KILLS)] if seed < len(KILLS) else draw.choice(KILLS)
        node = cluster.nodes[draw.choice(["n1", "n2"])]
        already = job.parts()
        wanted = already + draw.randrange(1, 8)
        state = ""

        def is_time(wanted: int = wanted) -> bool:
            nonlocal state
            state = cluster.job(job.id)["JobState"]
            return job.parts() >= wanted or state == "COMPLETED"

        wait_for(is_time, "the moment to kill")
        print(
            f"seed {seed}: {kill.__name__} {node.name} at {wanted} parts, {state}", file=sys.stderr
        )
        kill(cluster, node, draw)
    job.wait_for_end()
    assert job.results() == list(range(SAMPLES)), job.output
    cluster.wait_until_clean()
