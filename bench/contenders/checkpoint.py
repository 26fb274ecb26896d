"""Checkpoints of ``torch.distributed.checkpoint`` on a volume: save, load, and the stall of a step.

A child process imports PyTorch and forks the ranks, each of which has its share of a training state
in tensors of its own. They save it, load it again after the kernel's caches were dropped, and save
changed ones in the background. ``async_save`` holds up the training for as long as it takes to
return; with ``async_staging``, for that and for what is left of the copy when the next step is
about to change the state. That step leaves the processors free, as one that a GPU computes. A small
state is saved and loaded first, because PyTorch imports much on first use, and the first background
save of a kind is not timed: it allocates the memory of the copies. A round is one such run, so that
PyTorch is imported once.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import dlfs
from bench.datasets import Scene
from bench.errors import Unavailable, WrongBytesError
from bench.measurement import Environment, Measurement
from bench.process import Parent, run_child, run_program, start_child
from bench.resources import cpu_seconds
from dlfs.base.units import MIB

RANKS = 4
SMALL_TENSORS = 16
"""Small tensors of a rank, as biases and norms, in addition to its large ones."""
SMALL_BYTES = 4096
STEPS = ("save", "load", "stall", "overlap")
COMPUTE_SECONDS = 0.25
"""Time of a training step until it changes the state."""


@dataclass(frozen=True)
class Checkpoint:
    """A save of a training state by several ranks; its load and its stall are in the notes."""

    label = f"DLFS checkpoint: save by {RANKS} ranks"

    def run(self, environment: Environment) -> Measurement:
        if importlib.util.find_spec("torch") is None:
            raise Unavailable("PyTorch is not installed: pip install '.[torch]'")
        scene = environment.scene
        format_volume(scene)
        environment.machine.require_cold()
        job = Job(str(scene.volume), scene.source.lengths.tolist(), scene.seed + environment.round)
        with start_child(__name__, job, scene.folder / "checkpoint.log") as child:
            child.answer()  # PyTorch is imported, the ranks have their states
            found = {}
            for step in STEPS:
                environment.machine.require_cold()
                child.send(step)
                found[step] = child.answer()
        notes = {
            "load_seconds": found["load"]["seconds"],
            "stall_seconds": found["stall"]["seconds"],
            "background_seconds": found["stall"]["background_seconds"],
            "overlapped_stall_seconds": found["overlap"]["seconds"],
        }
        return Measurement(
            len(scene),
            scene.sample_bytes,
            found["save"]["seconds"],
            found["save"]["cpu_seconds"],
            found["load"]["checked"],
            notes,
        )


def format_volume(scene: Scene) -> None:
    """Format the scene's volume anew, with room for the states."""
    size_bytes = (4 * scene.sample_bytes + 64 * MIB) // MIB * MIB
    dlfs.format_volume(str(scene.volume), size_bytes=size_bytes, force=True)


# ---- the child -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """The volume to save to, the lengths of all ranks' large tensors in bytes, and a seed."""

    volume: str
    lengths: list[int]
    seed: int


def work(job: Job, parent: Parent) -> None:
    """Fork the ranks and let them take one step after the other."""
    import torch.distributed.checkpoint  # noqa: F401  before the ranks are forked

    import dlfs.adapters.torch.checkpoint
    import dlfs.volume.volume  # noqa: F401

    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [forks.Pipe() for _ in range(RANKS)]
        ranks = [
            forks.Process(target=_rank, args=(job, rank, f"{folder}/init", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for rank, (_, theirs) in zip(ranks, pairs, strict=True):
            rank.start()
            theirs.close()
        ours = [own for own, _ in pairs]
        _collect(ours)
        parent.answer(ready=True)
        for step in STEPS:
            parent.wait_for(step)
            for own in ours:
                own.send(step)
            found = _collect(ours)
            if found.get("unequal"):
                raise WrongBytesError(f"{found['unequal']} tensors are not what was saved")
            parent.answer(**found)
        for rank in ranks:
            rank.join()


def _collect(ranks: list[Connection]) -> dict[str, float]:
    """Return the longest times and the sums of other values that the ranks answer."""
    answers = []
    for rank in ranks:
        try:
            answers.append(rank.recv())
        except EOFError:
            raise Unavailable("a rank failed; see the log") from None
    return {
        name: (max if name.endswith("seconds") and name != "cpu_seconds" else sum)(
            answer[name] for answer in answers
        )
        for name in answers[0]
    }


def _rank(job: Job, rank: int, init: str, parent: Connection) -> None:
    """Be one rank: take each step when it is asked for, together with the others."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=RANKS)
    warm_up = _State(Job(job.volume, [SMALL_BYTES] * RANKS, 0), rank, "warm-up")
    warm_up.save(dist.barrier)
    warm_up.load(dist.barrier)
    state = _State(job, rank)
    parent.send({"ready": 1})
    for step in STEPS:
        assert parent.recv() == step
        parent.send(getattr(state, step)(dist.barrier))
    dist.destroy_process_group()


class _State:
    """The training state of one rank."""

    def __init__(self, job: Job, rank: int, name: str = "checkpoint") -> None:
        self._job = job
        self._rank = rank
        self._name = name
        self.tensors = dict(self._make())

    def _make(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the values of each tensor, which do not compress."""
        import torch

        random = torch.Generator().manual_seed(self._job.seed * RANKS + self._rank)
        small = [SMALL_BYTES] * SMALL_TENSORS
        for number, length in enumerate([*self._job.lengths[self._rank :: RANKS], *small]):
            values = torch.randint(0, 1 << 31, (length // 4,), generator=random, dtype=torch.int32)
            yield f"rank{self._rank}.{number}", values

    def save(self, barrier: Callable[[], None]) -> dict[str, float]:
        """Save the state; return the time until all ranks have saved theirs."""
        import torch.distributed.checkpoint as dcp

        from dlfs.adapters.torch.checkpoint import StorageWriter

        writer = StorageWriter(self._job.volume, self._name)
        barrier()
        cpu, start = cpu_seconds(), time.perf_counter()
        dcp.save(self.tensors, checkpoint_id="1", storage_writer=writer)
        barrier()
        return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu}

    def load(self, barrier: Callable[[], None]) -> dict[str, float]:
        """Load the state into cleared tensors, and compare it."""
        import torch
        import torch.distributed.checkpoint as dcp

        from dlfs.adapters.torch.checkpoint import StorageReader

        for tensor in self.tensors.values():
            tensor.zero_()
        barrier()
        start = time.perf_counter()
        dcp.load(self.tensors, storage_reader=StorageReader(self._job.volume, self._name))
        barrier()
        seconds = time.perf_counter() - start
        equal = sum(torch.equal(self.tensors[name], expected) for name, expected in self._make())
        return {"seconds": seconds, "checked": equal, "unequal": len(self.tensors) - equal}

    def stall(self, barrier: Callable[[], None]) -> dict[str, float]:
        """Save changed states in the background; return the time that the second call took."""
        import torch.distributed.checkpoint as dcp

        from dlfs.adapters.torch.checkpoint import StorageWriter

        writer = StorageWriter(self._job.volume, self._name, keep=1)
        for step in ("2", "3"):
            self._change(barrier)
            start = time.perf_counter()
            saved = dcp.async_save(self.tensors, checkpoint_id=step, storage_writer=writer)
            stalled = time.perf_counter()
            saved.result()
            barrier()
        seconds = time.perf_counter() - stalled
        writer.close()
        return {"seconds": stalled - start, "background_seconds": seconds}

    def overlap(self, barrier: Callable[[], None]) -> dict[str, float]:
        """Do the same with the copy in the background; return what a step took longer for it."""
        import torch.distributed.checkpoint as dcp

        from dlfs.adapters.torch.checkpoint import StorageWriter

        writer = StorageWriter(self._job.volume, self._name, keep=1, async_staging=True)
        for step in ("4", "5"):
            self._change(barrier)
            start = time.perf_counter()
            saved = dcp.async_save(self.tensors, checkpoint_id=step, storage_writer=writer)
            time.sleep(COMPUTE_SECONDS)
            saved.staging_completion.result()
            stalled = time.perf_counter() - start - COMPUTE_SECONDS
            saved.upload_completion.result()
            barrier()
        return {"seconds": stalled}

    def _change(self, barrier: Callable[[], None]) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1)
        barrier()


if __name__ == "__main__":
    run_program(lambda: run_child(Job, work))
