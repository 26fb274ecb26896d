"""Checkpoints of ``torch.distributed.checkpoint`` on a volume.

``StorageWriter`` saves and ``StorageReader`` loads, at any number of ranks. ``layout`` has the
names of the datasets and the commit, ``pieces`` what one rank writes, ``staging`` the copies of
``async_save``.
"""

from dlfs.adapters.torch.checkpoint.layout import Checkpoint
from dlfs.adapters.torch.checkpoint.reader import StorageReader
from dlfs.adapters.torch.checkpoint.writer import StorageWriter

__all__ = ["Checkpoint", "StorageReader", "StorageWriter"]
