"""Adapters for PyTorch: loaders, map-style datasets and samplers.

``Loader`` returns the batches of an epoch as tensors, read ahead. Any number of ranks and worker
processes share an epoch exactly, and a checkpoint resumes at another number of either.
``SampleDataset`` with ``DistributedSampler`` or ``DistributedBatchSampler`` is the map-style way,
for training loops that have a ``torch.utils.data.DataLoader`` already. ``ImportingLoader`` trains
while an import runs, and is a ``Loader`` of what was imported from then on. ``FolderLabels`` and
``ColumnLabels`` give the label of each sample.

All classes take what ``dlfs.open`` returns, in forked and spawned workers as well. The workers of a
``DataLoader`` have equal parts of the ``memory_bytes`` of ``dlfs.open``, which all datasets of the
volume share. The training process then reads nothing itself.
"""

from dlfs.base.extras import install_command
from dlfs.errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise UsageError(
        f"import dlfs.adapters.torch: expected PyTorch to be installed: {install_command('torch')}"
    ) from error

from dlfs.adapters.torch.context import SampleContext
from dlfs.adapters.torch.dataset import SampleDataset
from dlfs.adapters.torch.importing import ImportingLoader
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
    "ImportingLoader",
    "Jagged",
    "Loader",
    "SampleContext",
    "SampleDataset",
    "SampleViews",
    "TensorBatch",
    "collate_jagged",
    "collate_list",
]
