"""A dataset as a ``Datasource`` of Ray Data.

Each read task of Ray is a part of the epoch's order, so that every sample is read once, at any
parallelism, also where Ray starts a task again after its worker died::

    rows = ray.data.read_datasource(Source(dataset, columns=["path", "image", "label"]))
    rows.map_batches(decode).iter_torch_batches(batch_size=256)

A row has the columns that ``dlfs.adapters.arrow`` describes. Arrays are Ray's tensors. The bytes of
the samples are copied once, into Ray's object store.

A task is pickled without its samples. The worker that runs it opens the dataset under the name by
which it was opened: on other machines, the devices or the service must have the same name there.

Needs the packages of the extra ``ray``. Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from dlfs import Dataset, DatasetView
from dlfs.adapters.arrow import Part, TableFormat, TableKeywords, as_native, divide, order_of
from dlfs.base.extras import install_command
from dlfs.errors import UsageError

try:
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata
    from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray
except ImportError as error:
    raise UsageError(
        f"import dlfs.adapters.ray: expected Ray Data to be installed ({error}): "
        f"{install_command('ray')}"
    ) from error

if TYPE_CHECKING:
    import pyarrow


class Source(Datasource):
    """The samples of an epoch, for ``ray.data.read_datasource``.

    Args:
        dataset: dataset to read from, or a view.
        columns: names of the columns; by default all.
        order: samples and their order, as for ``dlfs.adapters.arrow.tables``; storage order, the
            default, is read sequentially.

    Raises:
        UsageError: an argument is out of range, or there is no such column.
    """

    def __init__(
        self,
        dataset: Dataset | DatasetView,
        *,
        columns: Sequence[str] | None = None,
        **order: Unpack[TableKeywords],
    ) -> None:
        super().__init__()
        self._format = TableFormat.of(dataset, columns, is_copied=True)
        self._options = order_of(Source, order)

    def get_name(self) -> str:
        """Return the name that Ray shows."""
        return f"Dlfs({self._format.dataset.name})"

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all samples of the epoch."""
        return sum(part.sample_bytes() for part in divide(self._format, self._options, 1))

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,  # noqa: ARG002  Ray passes it by name
    ) -> list[ReadTask]:
        """Return the read tasks: parts of the epoch, each of which gives some blocks.

        Args:
            parallelism: number of tasks, >= 1; fewer if there are fewer samples.
            per_task_row_limit: rows after which Ray ends a task; None for all.
            data_context: Ray's settings; unused.
        """
        tasks = []
        for part in divide(self._format, self._options, parallelism):
            metadata = BlockMetadata(
                num_rows=part.count,
                size_bytes=part.sample_bytes(),
                exec_stats=None,
                input_files=None,
            )
            read = partial(_blocks, part)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _blocks(part: Part) -> Iterator[pyarrow.Table]:
    """Read the blocks of a part; Ray calls it in a worker process."""
    yield from part.tables(_tensors)


def _tensors(values: Any, _kind: object) -> Any:
    """Return arrays as a column of Ray's tensors."""
    if isinstance(values, list):
        return ArrowVariableShapedTensorArray.from_numpy([as_native(one) for one in values])
    return ArrowTensorArray.from_numpy(as_native(values))
