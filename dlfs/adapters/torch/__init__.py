"""Training with PyTorch.

``Loader`` gives an epoch's batches as tensors, read ahead, in an order that any number of ranks and
worker processes share exactly, and goes on from a checkpoint at another number of either.
``SampleDataset`` with ``DistributedSampler`` or ``DistributedBatchSampler`` is the map-style way
for training loops that have a ``torch.utils.data.DataLoader`` already. ``FolderLabels`` and
``ColumnLabels`` say the label of each sample.

Everything works on what ``dlfs.open`` gives, in forked and spawned workers. Each open dataset has a
budget of sample memory in each process that reads from it, the ``memory_bytes`` of ``dlfs.open``:
D datasets and W workers take up to D * W times that. The training process itself reads nothing
then.
"""

from dlfs.errors import UsageError
from dlfs.extras import install_command

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise UsageError(
        f"import dlfs.adapters.torch: expected PyTorch to be installed: {install_command('torch')}"
    ) from error

from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.dataset import SampleDataset
from dlfs.adapters.torch.labels import ColumnLabels, FolderLabels
from dlfs.adapters.torch.loader import Loader
from dlfs.adapters.torch.sampler import DistributedBatchSampler, DistributedSampler
from dlfs.adapters.torch.tensors import (
    Jagged,
    SampleViews,
    TensorBatch,
    collate_jagged,
    collate_list,
)

__all__ = [
    "ColumnLabels",
    "DistributedBatchSampler",
    "DistributedSampler",
    "FolderLabels",
    "Jagged",
    "Loader",
    "SampleContext",
    "SampleDataset",
    "SampleViews",
    "TensorBatch",
    "collate_jagged",
    "collate_list",
]
