"""``python -m bench.cluster``: multi-node training, and the losses that it survives.

A Slurm cluster of namespaces on this machine (``tests.slurm.lab``) has 2 or 4 nodes, on which a
volume with two replicas lies on two storage nodes. A job starts a node service and torchrun on each
node, 8 ranks with gloo in all, which train an epoch. Three runs for each number of nodes:

- ``dlfs``: an epoch; the order is checked, and CPU time of ranks, services and storage counted;
- ``sshfs``: the same job reads files of the storage node through sshfs;
- ``losses``: one storage node is killed, then one rank, then a whole node with its service:
  torchrun goes on, in the end with fewer ranks. The order must be that of an epoch without losses.

All nodes share the processors of this machine: CPU time means something, rates do not. Root, Slurm,
sshfs, and PyTorch in the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.cluster import job
from bench.cluster.orders import check_order, read_logs, trained_order
from bench.cluster.storage import uri_of
from bench.cluster.trainer import SEED
from bench.command import Session, command_line, matches, plain_arguments
from bench.errors import BenchmarkError, Unavailable
from bench.process import run_program
from bench.progress import Stretch
from bench.report import Report, Table
from dlfs.base.units import MIB
from tests.slurm.lab import Machine, SlurmLab, lacks_slurm
from tests.support.waiting import wait_for

RANKS = 8
RUNS = ("dlfs", "sshfs", "losses")
PORTS = (4420, 4421)
SAMPLE_BYTES = 4096
WAIT_S = 300
LOSSES_S = 30
"""Least time of an epoch in which losses happen, in seconds."""
_COLUMNS = ("run", "samples", "ranks", "ranks' CPU", "service or sshfs", "storage", "order")


class Cluster:
    """A lab with storage nodes, files, and the same files in a volume.

    Args:
        lab: the lab.
        samples: number of files of 4 KiB, a multiple of the job's global batch.
    """

    def __init__(self, lab: SlurmLab, samples: int) -> None:
        self.lab, self.samples = lab, samples
        self.files = lab.shared / "files"
        self.files.mkdir()
        generator = random.Random(SEED)
        for number in range(samples):
            (self.files / f"{number:06}").write_bytes(generator.randbytes(SAMPLE_BYTES))
        self.volume = ",".join(uri_of("10.77.0.1", port) for port in PORTS)
        self._storage: list[subprocess.Popen[str]] = []

    def start_storage(self) -> None:
        """Start the storage nodes, and import the files."""
        size = str(64 * MIB + 2 * self.samples * SAMPLE_BYTES)
        for port in PORTS:
            words = ("python", "-m", "bench.cluster.storage", "10.77.0.1", str(port), size)
            started = self.lab.head.start(*words)
            self._storage.append(started)
            assert started.stdout is not None
            line = started.stdout.readline()
            if line != "ready\n":
                raise BenchmarkError(f"start a storage node: {line}{started.stdout.read()}")
        self.lab.head.run("dlfs", "format", self.volume, "--replicas", "2", "--quiet")
        options = ("--name", "files", "--quiet")
        self.lab.head.run("dlfs", "import", str(self.files), self.volume, *options)

    def kill_storage(self, *ports: int) -> None:
        """Kill storage nodes; their namespaces are memory."""
        for port in ports:
            kill(self.lab.head, f"bench.cluster.storage 10.77.0.1 {port}")

    def stop_storage(self) -> None:
        """Kill all storage nodes, and wait for their end."""
        self.kill_storage(*PORTS)
        for process in self._storage:
            process.communicate()
        self._storage.clear()

    @contextmanager
    def sshd(self) -> Iterator[Path]:
        """Serve files by ssh on the head; yields the private key of the clients."""
        folder = self.lab.folder / "ssh"
        folder.mkdir(exist_ok=True)
        for name in ("host", "user"):
            if not (folder / name).exists():
                key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
                subprocess.run(key, check=True)
        self.lab.head.run("mkdir", "-p", "/run/sshd")
        options = {"AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no"}
        options |= {"Subsystem": "sftp /usr/lib/openssh/sftp-server"}
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        program = ("/usr/sbin/sshd", "-D", "-p", str(job.SSH_PORT), "-f", "/dev/null")
        server = self.lab.head.start(*program, "-h", str(folder / "host"), *words)
        try:
            yield folder / "user"
        finally:
            kill(self.lab.head, "/usr/sbin/sshd")
            server.communicate()

    def expected(self) -> list[int]:
        """Return the order of the epoch, as one process sees it."""
        code = (
            "import dlfs, sys\n"
            "with dlfs.open(sys.argv[1]) as volume, volume['files'] as files:\n"
            "    print(*files.sequence(seed=int(sys.argv[2])).indices())\n"
        )
        shown = self.lab.head.run("python", "-c", code, self.volume, str(SEED))
        return [int(word) for word in shown.split()]


def kill(machine: Machine, pattern: str) -> None:
    """Kill the processes of a machine with a text in their command."""
    for pid in machine.processes(pattern):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Run:
    """One job on a cluster.

    Args:
        cluster: the cluster.
        name: name of the run's folder.
        pause: seconds of each step.
        source: what ``job.make_script`` takes of the source of the samples.
    """

    def __init__(self, cluster: Cluster, name: str, *, pause: float = 0, **source: Any) -> None:
        self.cluster, self.lab = cluster, cluster.lab
        self.folder = self.lab.shared / name
        self.folder.mkdir()
        nodes = len(self.lab.nodes)
        script = job.make_script(
            self.lab.folder, self.folder, nodes=nodes, ranks=RANKS // nodes, pause=pause, **source
        )
        output = f"--output={self.folder}/output"
        self.job = self.lab.submit(script, f"--nodes={nodes}", "--no-kill", output)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition.

        Raises:
            BenchmarkError: the job has ended without it, or it took too long.
        """
        deadline = time.monotonic() + WAIT_S
        while not condition():
            state = self.lab.job(self.job)["JobState"]
            if state not in ("PENDING", "RUNNING", "COMPLETING") or time.monotonic() > deadline:
                output = (self.folder / "output").read_text(errors="replace")[-4000:]
                raise BenchmarkError(f"waited for {what}, but the job is {state}: {output}")
            time.sleep(0.2)

    def wait_for_file(self, name: str) -> None:
        """Wait for a file of the ranks."""
        self.wait((self.folder / name).exists, f"the ranks' {name}")

    def wait_for_position(self, share: float) -> None:
        """Wait until a share of the epoch was trained."""
        wanted = share * self.cluster.samples
        self.wait(lambda: self.position() >= wanted, f"position {wanted:.0f}")

    def position(self) -> int:
        """Return the position of the state that rank 0 wrote last."""
        path = self.folder / "state.json"
        if not path.exists():
            return 0
        state = json.loads(path.read_text())
        return int(state["position"]) + int(state["epoch"]) * self.cluster.samples

    def allow(self, name: str) -> None:
        """Let the ranks go on."""
        (self.folder / name).touch()

    def finish(self) -> None:
        """Wait for the end of the job, and cancel what lost nodes have left of it."""
        self.allow("end")
        self.wait(lambda: not self._has_trainers(), "the end of the ranks")
        wait_for(lambda: not self._has_agents(), "the end of torchrun")
        self.lab.head.try_run("scancel", str(self.job))
        ended = ("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL")
        wait_for(lambda: self.lab.job(self.job)["JobState"] in ended, "the end of the job")

    def _has_agents(self) -> bool:
        nodes = [node for node in self.lab.nodes.values() if node.is_up]
        return any(node.processes("torch.distributed.run") for node in nodes)

    def _has_trainers(self) -> bool:
        return any(job.trainers(node) for node in self.lab.nodes.values() if node.is_up)


def measure(run: Run, services: Sequence[str], storage: Sequence[str]) -> dict[str, float]:
    """Let a job run, and return the CPU time that each part took for the epoch, in seconds."""
    nodes, head = run.lab.nodes.values(), run.lab.head

    def used() -> tuple[float, float]:
        return (
            sum(job.cpu_seconds(node, *services) for node in nodes),
            job.cpu_seconds(head, *storage),
        )

    run.wait_for_file("ready")
    before = used()
    run.allow("go")
    run.wait_for_file("done")
    after = used()
    run.finish()
    samples, ranks = job.rank_seconds(run.folder)
    if samples != run.cluster.samples:
        raise BenchmarkError(f"expected {run.cluster.samples} samples, got {samples}")
    return {"ranks": ranks, "service": after[0] - before[0], "storage": after[1] - before[1]}


def run_dlfs(cluster: Cluster) -> dict[str, Any]:
    """Train an epoch of the volume."""
    run = Run(cluster, "dlfs", volume=cluster.volume)
    seconds = measure(run, ["dlfs serve"], ["bench.cluster.storage"])
    order = trained_order(read_logs(run.folder), cluster.samples)
    check_order(order, cluster.expected())
    return {"cpu_seconds": seconds, "ranks": str(RANKS)}


def run_sshfs(cluster: Cluster) -> dict[str, Any]:
    """Train an epoch of the files through sshfs."""
    import torch

    with cluster.sshd() as key:
        run = Run(cluster, "sshfs", files=cluster.files, key=key)
        seconds = measure(run, ["sshfs", "ssh "], ["sshd", "sftp-server"])
    order = trained_order(read_logs(run.folder), cluster.samples)
    generator = torch.Generator().manual_seed(SEED)
    check_order(order, torch.randperm(cluster.samples, generator=generator).tolist())
    return {"cpu_seconds": seconds, "ranks": str(RANKS)}


def run_losses(cluster: Cluster) -> dict[str, Any]:
    """Train an epoch while a storage node, a rank and a node are lost."""
    expected = cluster.expected()
    steps = cluster.samples / job.GLOBAL_BATCH
    run = Run(cluster, "losses", pause=LOSSES_S / steps, volume=cluster.volume)
    run.allow("go")
    run.wait_for_position(0.15)
    cluster.kill_storage(PORTS[1])
    run.wait_for_position(0.4)
    node = run.lab.nodes["n2"]
    os.kill(job.trainers(node)[0], signal.SIGKILL)
    run.wait_for_position(0.65)
    last = run.lab.nodes[f"n{len(run.lab.nodes)}"]
    last.crash()
    run.wait_for_file("done")
    run.finish()
    last.boot()
    logs = read_logs(run.folder)
    check_order(trained_order(logs, cluster.samples), expected)
    sizes = [steps[0]["ranks"] for steps in logs if steps]
    attempts = [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]
    return {"ranks": " then ".join(map(str, attempts)), "logs": len(sizes)}


def row_of(name: str, samples: int, found: dict[str, Any]) -> list[str]:
    """Return the row of a run, with CPU time in microseconds a sample."""
    seconds = found.get("cpu_seconds")
    cells = ["", "", ""]
    if seconds is not None:
        cells = [f"{value / samples * 1e6:.0f} us" for value in seconds.values()]
    return [name, str(samples), found["ranks"], *cells, "exact"]


def measure_all(arguments: argparse.Namespace, report: Report, _stretch: Stretch) -> None:
    """Make all runs of each number of nodes."""
    lacks = lacks_slurm() or next(
        (f"no {name}" for name in ("sshfs", "sshd") if shutil.which(name) is None), None
    )
    if lacks is not None:
        raise Unavailable(f"train on a cluster: {lacks}")
    runs = {"dlfs": run_dlfs, "sshfs": run_sshfs, "losses": run_losses}
    for nodes in arguments.nodes:
        rows: list[list[str]] = []
        with ExitStack() as stack:
            stack.callback(partial(add_table, report, nodes, rows))
            cluster = Cluster(stack.enter_context(SlurmLab(nodes=nodes)), arguments.samples)
            stack.callback(cluster.stop_storage)
            cluster.start_storage()
            for name in (name for name in RUNS if matches(name, arguments.only)):
                found = runs[name](cluster)
                report.data["runs"][f"{nodes} nodes, {name}"] = found
                rows.append(row_of(name, arguments.samples, found))


def add_table(report: Report, nodes: int, rows: list[list[str]]) -> None:
    """Add the runs of a cluster to the report, those before an error, too."""
    report.add(Table(f"{nodes} nodes", _COLUMNS, rows))


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    parser = command_line("bench.cluster", __doc__, "dir", "results")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--samples", type=int, default=800 * job.GLOBAL_BATCH)
    parser.add_argument("--only", action="append", help="runs: dlfs, sshfs, losses")
    arguments = parser.parse_args(words)
    session = Session("cluster", arguments.dir)
    data = {"arguments": plain_arguments(arguments), "runs": {}}
    title = "Multi-node training on a cluster of namespaces"
    report = Report("cluster", title, session.facts, data)
    code = session.measure(partial(measure_all, arguments, report))
    session.write(report, arguments.results)
    return code


if __name__ == "__main__":
    run_program(main)
