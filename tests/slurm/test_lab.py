"""The cluster of the tests itself: jobs of users, a node that crashes, and what a lab leaves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm

SLEEPER = """\
#!/bin/bash
srun --label sh -c 'echo "$SLURM_RESTART_COUNT" >>started.$(hostname); exec sleep 1000'
"""


def links() -> set[str]:
    """Return the network links of this machine."""
    shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return {line.split()[1] for line in shown.splitlines()}


def test_a_lab_runs_jobs_and_survives_a_crash() -> None:
    before = links()
    with SlurmLab(nodes=2) as lab:
        shown = lab.head.run(
            "srun", "--nodes=2", "--label", "sh", "-c", "hostname; id -un", user="ann"
        )
        lines = [line for line in shown.splitlines() if not line.startswith("srun:")]
        assert sorted(lines) == ["0: ann", "0: n1", "1: ann", "1: n2"]
        job = lab.submit(SLEEPER, "--nodes=2", "--requeue", user="ann")
        lab.wait_for_state(job, "RUNNING")
        lab.wait_for_files("started.n1", "started.n2")
        assert lab.nodes["n2"].processes("sleep 1000")
        lab.nodes["n2"].crash()
        lab.wait_for_state(job, "PENDING")
        lab.nodes["n2"].boot()
        lab.wait_for_state(job, "RUNNING")
        pids = [pid for node in lab.nodes.values() for pid in node.processes()]
        folder = lab.folder
    assert not folder.exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert links() == before
    assert folder.name not in Path("/proc/self/mountinfo").read_text()
