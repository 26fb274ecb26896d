"""deploy/slurm/burst-buffer on nodes of this machine, without Slurm and SPDK.

Each node has an address of its own in 127.0.0.0/8. tests/slurm/test_burst_buffer.py has SPDK's
target, keys, and a cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

import dlfs
from dlfs.reader.epoch import Epoch
from tests.support.volumes import write_dataset

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/slurm/burst-buffer"
NODES = ("n1", "n2", "n3")
OTHER_NODES = ("n4", "n3")
SAMPLES = {f"{number:03}": bytes([number]) * (500 + 40 * number) for number in range(200)}
BATCH = 5
STEPS = 6

_SCONTROL = """\
#!/bin/sh
[ "$2" = hostnames ] && echo "$3" | tr , '\\n' && exit
echo "JobId=$SLURM_JOB_ID NodeList=$(cat "{folder}/nodes") TresPerNode=gres:burst:8M"
"""
_CONF = """\
STORE={folder}/disk-$node_name
STATE={folder}/run-$node_name
KEY=
WAIT_S=20
NVMF_TGT='{python} -m tests.deploy.scripted_nvmf_tgt'
address_of() {{ echo "127.7.$((job % 250)).${{1#n}}"; }}
"""

pytestmark = pytest.mark.timeout(120)


class Cluster:
    """Nodes of this machine; ``nodes`` are those of the job."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("spdk.rpc.client", reason="no client (pip install spdk)")
        self.folder = folder
        self.job = 1 + os.getpid() % 9999
        programs = folder / "bin"
        programs.mkdir()
        (programs / "scontrol").write_text(_SCONTROL.replace("{folder}", str(folder)))
        self.move(NODES)
        (programs / "squeue").write_text(f"#!/bin/sh\necho {self.job}\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        conf = folder / "conf"
        conf.write_text(
            _CONF.format(folder=folder, python=sys.executable).replace(
                "$node_name", "$SLURMD_NODENAME"
            )
        )
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "DLFS_BURST_CONF": str(conf),
            "SLURM_JOB_ID": str(self.job),
        }

    def move(self, nodes: tuple[str, ...]) -> None:
        """Give the job other nodes."""
        self.nodes = nodes
        (self.folder / "nodes").write_text(",".join(reversed(nodes)))

    def start(self, verb: str, node: str) -> subprocess.Popen[str]:
        """Start a verb on a node."""
        return subprocess.Popen(
            [str(SCRIPT), verb],
            env={**self._environment, "SLURMD_NODENAME": node},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, verb: str, node: str) -> str:
        """Run a verb on a node; return its output."""
        with self.start(verb, node) as process:
            output, errors = process.communicate()
        assert process.returncode == 0, f"{node}: {verb}: {errors}"
        return output

    def run_on_all(self, verb: str) -> None:
        """Run a verb on all nodes of the job at the same time."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: self.run(verb, node), self.nodes))

    def stage(self) -> None:
        """Make the volume and import the dataset, as the script of a job does."""
        source = self.folder / "source"
        source.mkdir(exist_ok=True)
        for name, data in SAMPLES.items():
            (source / name).write_bytes(data)
        volume = self.run("format", self.nodes[0]).strip()
        dlfs_import = ["dlfs", "import", str(source), volume, "--name", "photos"]
        subprocess.run(dlfs_import, env=self._environment, check=True, capture_output=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[dlfs.Dataset]]:
        """Open the dataset on each node of the job."""
        with ExitStack() as stack:
            volumes = [stack.enter_context(dlfs.open(self.volume(node))) for node in self.nodes]
            yield [stack.enter_context(volume["photos"]) for volume in volumes]

    def volume(self, node: str) -> str:
        """Return the volume's URI on a node, as the task prolog tells it."""
        lines = dict(
            line.removeprefix("export ").split("=", 1)
            for line in self.run("env", node).splitlines()
        )
        return lines["DLFS_BURST_BUFFER"]

    def target(self, node: str) -> int:
        """Return the process ID of a node's target."""
        socket = bytes(self.folder / f"run-{node}" / str(self.job) / "rpc.sock")
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if socket in each.read_bytes().split(b"\0"):
                    return int(each.parent.name)
        raise AssertionError(f"{node} has no target")

    def left(self) -> list[Path]:
        """Return the files that the nodes have of jobs."""
        return [
            path
            for node in {*NODES, *OTHER_NODES}
            for kind in ("run", "disk")
            for path in (self.folder / f"{kind}-{node}").glob("*")
        ]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.run_on_all("stop")


def take(epoch: Epoch, steps: int) -> list[int]:
    """Return the indices of the next batches of an epoch."""
    taken: list[int] = []
    for _ in range(steps):
        with next(epoch) as batch:
            assert [bytes(sample) for sample in batch] == [
                list(SAMPLES.values())[index] for index in batch.indices
            ]
            taken += batch.indices.tolist()
    return taken


def test_a_lost_node_costs_no_sample(cluster: Cluster) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: cluster.run("start", node), ("n1", "n2")))
    step = cluster.start("run", "n3")  # as a step of the job instead of the prolog
    cluster.run("start", "n1")  # changes nothing
    volume = cluster.run("format", "n1").strip()
    assert volume == cluster.volume("n1")
    write_dataset(volume, "photos", SAMPLES)
    assert cluster.run("format", "n1").strip() == volume
    targets = [cluster.target(node) for node in NODES]
    with ExitStack() as stack:
        datasets = [
            stack.enter_context(stack.enter_context(dlfs.open(cluster.volume(node)))["photos"])
            for node in NODES
        ]
        epochs = [
            dataset.batches(BATCH, seed=1, rank=rank, world_size=3)
            for rank, dataset in enumerate(datasets)
        ]
        read = [index for epoch in epochs for index in take(epoch, STEPS)]
        states = [epoch.state() for epoch in epochs]
        assert states[0] == states[1] == states[2]
        os.kill(targets[1], signal.SIGKILL)
        take(epochs[0], 2)  # goes on, but is lost with the step of the job
        for rank, dataset in enumerate((datasets[0], datasets[2])):
            epoch = dataset.batches(BATCH, seed=1, rank=rank, world_size=2).resume(states[0])
            read += [index for batch in epoch for index in batch.indices.tolist()]
    assert sorted(read) == list(range(len(SAMPLES)))
    cluster.run("start", "n2")  # a target that died has its bytes again
    with dlfs.open(volume) as opened:
        assert list(opened.verify()) == []
        assert {member.state for member in opened.info().members} == {"current"}
    targets.append(cluster.target("n2"))
    step.terminate()
    with step:
        step.communicate()
    cluster.run_on_all("stop")
    cluster.run("stop", "n2")
    assert cluster.left() == []
    assert not [pid for pid in targets if Path(f"/proc/{pid}/exe").exists()]


def test_a_requeued_job_goes_on_with_what_it_stages_again(cluster: Cluster) -> None:
    orders: tuple[Literal["global", "chunk"], ...] = ("global", "chunk")
    cluster.run_on_all("start")
    cluster.stage()
    with cluster.opened() as datasets:
        first = datasets[0].uuid
        epochs = {
            shuffle: [
                dataset.batches(BATCH, seed=1, shuffle=shuffle, rank=rank, world_size=3)
                for rank, dataset in enumerate(datasets)
            ]
            for shuffle in orders
        }
        read = {
            shuffle: [index for epoch in ranks for index in take(epoch, STEPS)]
            for shuffle, ranks in epochs.items()
        }
        states = {shuffle: ranks[0].state() for shuffle, ranks in epochs.items()}
    cluster.run_on_all("stop")
    assert cluster.left() == []
    cluster.move(OTHER_NODES)
    cluster.run_on_all("start")
    cluster.stage()
    with cluster.opened() as datasets:
        assert [dataset.uuid == first for dataset in datasets] == [False] * len(OTHER_NODES)
        for shuffle, state in states.items():
            for rank, dataset in enumerate(datasets):
                epoch = dataset.batches(BATCH, rank=rank, world_size=2).resume(state)
                read[shuffle] += take(epoch, len(epoch))
            assert sorted(read[shuffle]) == list(range(len(SAMPLES)))
