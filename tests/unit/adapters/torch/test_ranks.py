"""Ranks in the ways in which frameworks make them: every sample of an epoch once, or a refusal.

``ranks_of_frameworks`` trains and writes down what each rank got. The tests run some combinations;
with ``DLFS_RANKS=all`` all of them, which takes half an hour on two cores.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.unit.adapters.torch.conftest import COUNT

torch = pytest.importorskip("torch")

from tests.support.torch_processes import PROCESSES  # noqa: E402
from tests.unit.adapters.torch import ranks_of_frameworks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

WORLD = 2
KIND_TIMEOUT_S = 45.0
SPAWN_TIMEOUT_S = 150.0
"""Time for one kind. With spawn, each imports PyTorch and its framework in new processes."""

TORCH = ["loader", "loader+2", "wrapped", "wrapped+2", "pairs", "collated", "sampler", "sampler+2"]
TORCH += ["batch-sampler", "batch-sampler+2", "packed+2", "batches", "by-length", "tokens"]
STATEFUL = ["stateful", "stateful-sampler"]
EVENED = ["samples", "whole", "whole-sampler", "whole-batch-sampler"]
"""What Accelerate shares out; it repeats samples, so that the last batches are even."""
PREPARED = ["loader", "wrapped", "pairs", "collated", "sampler", "batch-sampler", *EVENED]

SOME = [
    ("torchrun", "before", TORCH),
    ("fork", "before", ["loader+2", "batch-sampler+2", "tokens"]),
    ("forkserver", "before", ["wrapped+1"]),
]

ALL = [
    *((how, made, TORCH) for how in ("torchrun", "fork") for made in ("before", "after")),
    ("spawn", "before", TORCH[:-3]),  # an epoch is not pickled
    ("spawn", "after", TORCH),
]

SOME_OF_FRAMEWORKS = [
    ("ddp_fork", "before", ["loader", "sampler", "wrapped+2", "batch-sampler", "packed+2"]),
    ("ddp", "before", ["loader"]),
    ("accelerate", "before", ["loader", "pairs", "sampler", "batch-sampler", "stateful"]),
    ("trainer", "before", ["loader", "sampler"]),
]

ALL_OF_FRAMEWORKS = [
    *(
        (how, made, [*TORCH[:-3], "samples", *STATEFUL])
        for how in ("ddp", "ddp_fork", "ddp_spawn")
        for made in ("before", "after")
    ),
    *(
        (how, made, [*PREPARED, *STATEFUL])
        for how in ("accelerate", "trainer")
        for made in ("before", "after")
    ),
    *(
        (how, made, STATEFUL)
        for how in ("torchrun", "fork", "spawn")
        for made in ("before", "after")
    ),
]

RESUMED = ["5:2x16:3x16"]
ALL_RESUMED = [
    *RESUMED,
    "8:2x16:1x16",
    "11:2x16:3x32",
    "3:3x16:2x32",
    "10:2x16:2x40",
    "7:1x32:2x16",
]

IS_ALL = os.environ.get("DLFS_RANKS") == "all"


def run(volume: Path, out: Path, how: str, made: str, kinds: list[str]) -> None:
    """Run two ranks, in a process that makes them."""
    arguments = (str(volume), str(out), how, made, *kinds)
    if how == "forkserver":  # that of this process
        ranks_of_frameworks.main(*arguments)
        return
    log = out / f"{how}-{made}.log"
    process = PROCESSES.Process(
        target=ranks_of_frameworks.main_of_process, args=(str(log), *arguments)
    )
    process.start()
    limit_s = SPAWN_TIMEOUT_S if "spawn" in how else KIND_TIMEOUT_S
    process.join(limit_s * (1 + len(kinds)))
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)  # its children are in its session
        missing = [kind for kind in kinds if not list(out.glob(f"{how}-{made}-{kind}-*.json"))]
        raise AssertionError(f"{how}, {made}: no results of {missing} in time")
    assert process.exitcode == 0, log.read_text(errors="replace")[-4000:]


def run_until_met(
    volume: Path, folder: Path, how: str, made: str, kinds: list[str], tries: int = 3
) -> Path:
    """Run the program, again if gloo's ranks did not meet, as it happens on a busy machine.

    Returns:
        The folder of the results.
    """
    out = folder / f"try-{tries}"
    out.mkdir()
    try:
        run(volume, out, how, made, kinds)
    except AssertionError as error:
        if tries == 1 or "Gloo connectFullMesh failed" not in str(error):
            raise
        return run_until_met(volume, folder, how, made, kinds, tries - 1)
    return out


def check(out: Path, how: str, made: str, kind: str) -> str:
    """Check what the ranks got of one kind; return the outcome."""
    name = f"{how}-{made}-{kind}"
    found = [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(WORLD)]
    if any("error" in one for one in found):
        errors = [one.get("error", "") for one in found]
        assert all(is_refusal(error) for error in errors), (name, errors)
        return "refused"
    epochs = list(zip(*(one["epochs"] for one in found), strict=True))
    for taken in epochs:
        indices = [index for rank in taken for index in rank]
        assert set(indices) == set(range(COUNT)), name
        evened = how in ("accelerate", "trainer") and kind in EVENED
        assert evened or len(indices) == COUNT, name
    if kind not in ("samples", "packed+2") and len(epochs) > 1:  # a sequence has its position
        assert epochs[0] != epochs[1], f"{name}: the same order in each epoch"
    return "exact"


def is_refusal(error: str) -> bool:
    """Return True if an error says what to do instead."""
    ours = "UsageError" in error and "rank 0 of 1" in error
    return ours or "set `Trainer(use_distributed_sampler=False)`" in error


def run_and_check(
    torch_volume: Path, tmp_path: Path, how: str, made: str, kinds: list[str]
) -> None:
    out = run_until_met(torch_volume, tmp_path, how, made, kinds)
    table = {kind: check(out, how, made, kind) for kind in kinds}
    print(f"{how}, loader made {made} the ranks: {table}")
    split = {"pairs", "collated", "wrapped", "sampler", "batch-sampler", *STATEFUL}
    for kind, outcome in table.items():
        refused = how in ("accelerate", "trainer") and kind in split
        assert outcome == ("refused" if refused else "exact"), (kind, outcome)


@pytest.mark.parametrize(("how", "made", "kinds"), ALL if IS_ALL else SOME)
def test_ranks_of_torch(torch_volume, tmp_path, how, made, kinds):
    run_and_check(torch_volume, tmp_path, how, made, kinds)


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("how", "made", "kinds"), ALL_OF_FRAMEWORKS if IS_ALL else SOME_OF_FRAMEWORKS
)
def test_ranks_of_frameworks(torch_volume, tmp_path, how, made, kinds):
    run_and_check(torch_volume, tmp_path, how, made, kinds)


@pytest.mark.frameworks
def test_lightning_resumes_with_other_ranks(torch_volume, tmp_path):
    kinds = ALL_RESUMED if IS_ALL else RESUMED
    run(torch_volume, tmp_path, "ddp_fork", "part", kinds)
    for kind in kinds:
        taken: list[list[int]] = [[], []]
        for number, part in enumerate(kind.split(":")[1:]):
            for rank in range(int(part.split("x")[0])):
                path = tmp_path / f"ddp_fork-part-{kind}-{number}-{rank}.json"
                for epoch, indices in enumerate(json.loads(path.read_text())["epochs"]):
                    taken[epoch] += indices
        for indices in taken:
            assert set(indices) == set(range(COUNT)), kind
            assert len(indices) < COUNT + 2 * 3, kind  # the last round of each part is completed
