"""The job that the benchmark submits, and what it takes of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

from tests.slurm.lab import Machine

GLOBAL_BATCH = 48
"""Samples of a step of all ranks, which 2, 4, 6 and 8 ranks divide."""
SSH_PORT = 2222

_SCRIPT = """\
#!/bin/bash
srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 bash {node}
"""
_NODE = """\
set -e
scratch={folder}/scratch-$SLURMD_NODENAME
{source}
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# The store that torchrun shares has the addresses of an attempt by a number that its nodes count
# apart: after a loss, ranks would connect to those of the attempt before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
{python} -m torch.distributed.run --nnodes={least}:{nodes} --nproc-per-node={ranks} \\
    --max-restarts=5 --rdzv-backend=c10d --rdzv-endpoint=n1:29400 --rdzv-id=$SLURM_JOB_ID \\
    --rdzv-conf=last_call_timeout=5,join_timeout=300 \\
    -m bench.cluster.trainer {arguments} &
training=$!
code=0
wait $training || code=$?
{end}
exit $code
"""
_SERVICE = """\
dlfs serve {uri} --socket $scratch/dlfs.sock --cache 64MiB --quiet &
service=$!
until [ -S $scratch/dlfs.sock ]; do sleep 0.1; done"""
_SSHFS = """\
mkdir -p $scratch/files
sshfs -p {port} -o IdentityFile={key} -o StrictHostKeyChecking=no \\
    -o UserKnownHostsFile=/dev/null 10.77.0.1:{files} $scratch/files"""


def make_script(
    folder: Path,
    run: Path,
    *,
    nodes: int,
    ranks: int,
    pause: float,
    volume: str | None = None,
    files: Path | None = None,
    key: Path | None = None,
) -> str:
    """Return a batch script, after its part for each node was written.

    Args:
        folder: folder of the lab.
        run: folder of the logs and the state of the run.
        nodes: nodes with which the job begins; it goes on with half of them, rounded up.
        ranks: ranks of each node.
        pause: seconds of each step.
        volume: URI of the volume that the service of each node serves.
        files: folder that each node mounts by sshfs instead.
        key: private key for ssh.
    """
    if volume is not None:
        source, end = _SERVICE.format(uri=shlex.quote(volume)), "kill $service; wait $service"
        read = "$scratch/dlfs.sock"
    else:
        source, end = _SSHFS.format(port=SSH_PORT, key=key, files=files), "umount $scratch/files"
        read = "$scratch/files"
    arguments = f"{read} {run} --global-batch {GLOBAL_BATCH} --pause {pause}"
    node = run / "node.sh"
    node.write_text(
        _NODE.format(
            folder=folder,
            source=source,
            python=sys.executable,
            least=(nodes + 1) // 2,
            nodes=nodes,
            ranks=ranks,
            arguments=arguments,
            end=end,
        )
    )
    return _SCRIPT.format(node=node)


def trainers(machine: Machine) -> list[int]:
    """Return the processes of the ranks on a node."""
    found = machine.processes("bench.cluster.trainer")
    return [pid for pid, command in found.items() if "torch.distributed.run" not in command]


def cpu_seconds(machine: Machine, *patterns: str) -> float:
    """Return the CPU time so far of the processes of a machine with one of these texts."""
    ticks = 0
    for pid in machine.processes(*patterns):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rank_seconds(run: Path) -> tuple[int, float]:
    """Return the samples and the CPU time of all ranks of a run that has ended."""
    reports = [json.loads(path.read_text()) for path in run.glob("cpu-*.json")]
    return sum(one["samples"] for one in reports), sum(one["cpu_seconds"] for one in reports)
