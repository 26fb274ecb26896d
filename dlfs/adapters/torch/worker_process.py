"""The behaviour of a ``Loader`` in the worker processes of a ``DataLoader``.

Threads: the main thread of a worker.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading

from dlfs.adapters.torch.tensors import TensorBatch


def as_it_is(batch: TensorBatch) -> TensorBatch:
    """Replace DataLoader's conversion, which would make tensors of the arrays in a batch."""
    return batch


def ignore_interrupts() -> None:
    """Ignore SIGINT in workers: terminals send Ctrl-C to them, the trainer handles it."""
    main = threading.current_thread() is threading.main_thread()
    if main and multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
