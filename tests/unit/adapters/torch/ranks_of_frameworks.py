"""Trains as several ranks and writes down which samples each of them got.

Lightning's ``ddp`` starts its program again, and so this is one:

    python -m tests.unit.adapters.torch.ranks_of_frameworks VOLUME OUT HOW MADE KIND...

``HOW`` is the way in which the ranks come to be, ``MADE`` says whether the loader is made
``before`` the ranks or ``after``, and each ``KIND`` is a class of the adapter. Rank r writes
``OUT/HOW-MADE-KIND-r.json``: the indices of each epoch, or the error that refused the combination.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, default_collate

import dlfs
from dlfs.adapters.torch import DistributedBatchSampler, DistributedSampler, Loader, SampleDataset
from dlfs.errors import DlfsError
from tests.support.torch_processes import set_rank

BATCH = 16
EPOCHS = 2
WORLD = 2
LAUNCHED = ("torchrun", "accelerate", "trainer")
"""Ranks that do not come from the framework."""
FORM: dict[str, Any] = {"dtype": "float32", "shape": (2, 3)}


def number(indices):
    return indices.astype("int64")


# ---- what is made --------------------------------------------------------------------------------


def make(kind: str, dataset: dlfs.Dataset) -> Any:
    """Make the loader, or what gives the batches, of a kind."""
    name, _, workers = kind.partition("+")
    made = EPOCHS_OF if name in EPOCHS_OF else LOADERS
    return made[name](dataset, **({"num_workers": int(workers)} if workers else {}))


def loader(dataset, batch: int = BATCH, **options: Any) -> Loader:
    return Loader(dataset, batch, seed=3, labels=number, **FORM, **options)


def packed(dataset, **options: Any) -> Loader:
    return Loader(dlfs.TokenSequences(dataset, 12), BATCH, seed=3, **options)


def wrapped(dataset, num_workers: int = 0, collate_fn: Any = None, **options: Any) -> DataLoader:
    inner = loader(dataset, **options)
    return DataLoader(inner, batch_size=None, num_workers=num_workers, collate_fn=collate_fn)


def samples(dataset) -> SampleDataset:
    return SampleDataset(dataset, labels=number, **FORM)


def sampler(dataset, *share: int, **options: Any) -> DataLoader:
    indices = DistributedSampler(dataset, *share, seed=3)
    options["collate_fn"] = collate_named
    return DataLoader(samples(dataset), BATCH, sampler=indices, **options)


def batch_sampler(dataset, *share: int, make: Any = DataLoader, **options: Any) -> DataLoader:
    batches = DistributedBatchSampler(dataset, BATCH, *share, seed=3)
    options["collate_fn"] = collate_named
    return make(samples(dataset), batch_sampler=batches, **options)


def stateful(*arguments: Any, **options: Any) -> DataLoader:
    module = import_module("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(*arguments, **options)


LOADERS: dict[str, Any] = {
    "loader": loader,
    "packed": packed,
    "wrapped": wrapped,
    "pairs": lambda dataset: wrapped(dataset, as_pairs=True),
    "collated": lambda dataset: wrapped(dataset, collate_fn=pair_of),
    "sampler": sampler,
    "batch-sampler": batch_sampler,
    "samples": lambda dataset: DataLoader(
        samples(dataset), BATCH, shuffle=True, collate_fn=collate_named
    ),
    "stateful": lambda dataset: stateful(loader(dataset), batch_size=None),
    "stateful-sampler": lambda dataset: batch_sampler(dataset, make=stateful),
    # All samples, for a framework that shares them out.
    "whole": lambda dataset: wrapped(dataset, rank=0, world_size=1),
    "whole-sampler": lambda dataset: sampler(dataset, 1, 0),
    "whole-batch-sampler": lambda dataset: batch_sampler(dataset, 1, 0),
}

EPOCHS_OF: dict[str, Any] = {
    "batches": lambda dataset: dataset.batches(BATCH, seed=3),
    "by-length": lambda dataset: dlfs.length_batches(dataset, 1 << 9, seed=3),
    "tokens": lambda dataset: dlfs.token_batches(dataset, 12, batch_size=BATCH, seed=3),
}


def pair_of(batch):
    return batch.samples, batch.labels


def collate_named(items):
    names = zip(("samples", "labels"), default_collate(items), strict=True)
    return dict(names)


def labels_of(batch: Any) -> list[int]:
    if type(batch) is dict:
        return batch["labels"].tolist()
    if isinstance(batch, tuple | list):
        return batch[1].tolist()
    labels = getattr(batch, "labels", None)
    return (batch.indices if labels is None else labels).tolist()


def is_epoch(made: Any) -> bool:
    return not isinstance(made, Loader | DataLoader)


# ---- what trains ---------------------------------------------------------------------------------


def take(made: Any) -> list[list[int]]:
    """Return the indices of some epochs, as a plain loop gets them."""
    taken = []
    for epoch in range(1 if is_epoch(made) else EPOCHS):
        if isinstance(getattr(made, "sampler", None), DistributedSampler):
            made.sampler.set_epoch(epoch)
        taken.append([index for batch in made for index in labels_of(batch)])
    return taken


def train(made: Any) -> list[list[int]]:
    """Return the indices of some epochs, as a loop with Accelerate gets them."""
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    prepared = accelerator.prepare(made)
    epochs = 1 if is_epoch(made) else EPOCHS
    return [[index for batch in prepared for index in labels_of(batch)] for _ in range(epochs)]


def train_with_trainer(made: Any, folder: Path) -> list[list[int]]:
    """Return the indices of some epochs, as Transformers' ``Trainer`` gets them."""
    transformers = import_module("transformers")
    taken: list[list[int]] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 1)

        def forward(self, samples, labels):
            taken[-1] += labels.tolist()
            return {"loss": self.linear(samples.flatten(1)).square().mean()}

    class Log(transformers.TrainerCallback):
        def on_epoch_begin(self, *arguments, **options) -> None:
            taken.append([])

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(made)

    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(model=Model(), args=arguments, callbacks=[Log()]).train()
    return taken


# ---- how ranks come to be ------------------------------------------------------------------------


class Log:
    """Writes what a rank got of one kind."""

    def __init__(self, out: Path, how: str, made: str, kind: str) -> None:
        self.name = f"{how}-{made}-{kind}"
        self.out = out

    def write(self, rank: int, found: Any) -> None:
        (self.out / f"{self.name}-{rank}.json").write_text(json.dumps(found))

    def run(self, rank: int, act: Any, *arguments: Any) -> None:
        try:
            found = {"epochs": act(*arguments)}
        except (DlfsError, TypeError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        self.write(rank, found)


def join(rank: int, address: str) -> None:
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )


def rank_of_pool(rank: int, dataset, address: str, log: Log, kind: str, made: Any) -> None:
    torch.set_num_threads(1)
    if mp.get_start_method() == "forkserver":  # a worker would have to start a server first
        mp.set_start_method("fork", force=True)
    join(rank, address)
    log.run(rank, lambda: take(make(kind, dataset) if made is None else made))
    dist.destroy_process_group()


def run_pool(dataset, out: Path, how: str, before: bool, kinds: list[str]) -> None:
    """Run ``mp.spawn``, or the same by forks, once for each kind."""
    for kind in kinds:
        log = Log(out, how, "before" if before else "after", kind)
        made = make(kind, dataset) if before else None
        arguments = (dataset, f"file://{out}/meeting-{log.name}", log, kind, made)
        mp.start_processes(rank_of_pool, arguments, WORLD, start_method=how)


def rank_of_launcher(
    rank: int, dataset, out: Path, how: str, before: bool, kinds: list[str]
) -> None:
    """Run one rank as a launcher starts it: a plain loop, Accelerate or ``Trainer``."""
    set_rank(rank, WORLD)
    torch.set_num_threads(1)
    early = {kind: make(kind, dataset) for kind in kinds} if before else {}
    join(rank, f"file://{out}/meeting-{how}-{before}")
    for kind in kinds:
        log = Log(out, how, "before" if before else "after", kind)

        def act(kind: str = kind) -> Any:
            made = early[kind] if before else make(kind, dataset)
            if how == "torchrun":
                return take(made)
            return train(made) if how == "accelerate" else train_with_trainer(made, out / "hf")

        log.run(rank, act)
    dist.destroy_process_group()


def run_launched(*arguments: Any) -> None:
    """Run the ranks of a launcher."""
    mp.start_processes(rank_of_launcher, arguments, WORLD, start_method="fork")


def main(volume: str, out: str, how: str, made: str, *kinds: str) -> None:
    if how in LAUNCHED:
        run = run_launched
    elif how in ("spawn", "fork", "forkserver"):
        run = run_pool
    else:
        run = import_module("tests.unit.adapters.torch.ranks_of_lightning").run
    with dlfs.open(volume) as opened, opened["arrays"] as dataset:
        run(dataset, Path(out), how, made == "before", list(kinds))


def main_of_process(log: str, *arguments: str) -> None:
    """Run ``main`` in a session of this process, with the output in a log file."""
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if "ddp" in arguments:
        os.execv(sys.executable, [sys.executable, "-m", __name__, *arguments])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
