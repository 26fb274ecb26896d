"""DLFS: a user-level file system service for deep-learning training.

What is re-exported here, and nothing else, is the public API. All of it is loaded when it is first
used, so that ``dlfs --help`` does not wait for numpy and libdlfs, nor Ctrl-C for anything.
"""

# The layers. Imports point down this list only; import-linter enforces it (pyproject.toml).
#
#   cli             the command line: one file per verb in cli/verbs. Nothing imports it.
#   diagnosis       what a machine lacks for DLFS; what limits the speed of a volume on it
#   adapters        torch, grain, tf, ray, dask, huggingface, arrow, fsspec: use only the public API
#   service         the node service: sample server, its clients, metrics
#   mount           datasets as files: the native server and the pyfuse3 server
#   staging         the staging area that incoming leads to: directories until they are sealed
#   ingest          formats and sources (folder, tar, ...) -> dataset writer; export
#   volume          Volume, the public API's home; changes, comparison, verification and repair
#   views           several datasets, or some of their samples, read as one
#   dataset         Dataset: samples of one sealed dataset; the writer that packs, seals, commits
#   connection      opens volumes and datasets, from devices or from a service
#   reader          plan, read, prefetch, cache; Batch
#   epoch           the order of an epoch: options, selection, permutation, shares, resume
#   attributes      columns of a dataset: builder, table
#   fields          named fields of samples: types, layout, columns
#   directory       the sample directory: builder, frozen tree
#   store           members, generations, free space, commit; growing, shrinking, rebalancing
#   format          bytes <-> records of the on-media format (FORMAT.md); no I/O
#   fabric          NVMe-oF control: discovery, export and composing of targets
#   block           BlockDevice and its kinds, device URIs
#   _native         the only place that knows ctypes
#   notebook        volumes, datasets, batches and epochs as HTML, for Jupyter
#   base            arguments, closing, deadlines, forks, threads, units, wording
#   errors          what DLFS raises

TYPE_CHECKING = False  # as typing has it, which would have to be loaded

if TYPE_CHECKING:
    from dlfs.base.arguments import Engine, Layout, OnError, ReadPlan, Shuffle
    from dlfs.dataset.arriving import ArrivingDataset
    from dlfs.dataset.arriving_epoch import ArrivingEpoch
    from dlfs.dataset.dataset import Dataset
    from dlfs.dataset.writer import DatasetWriter
    from dlfs.epoch.placement import Replicated, find_placement
    from dlfs.epoch.ranks import Placement
    from dlfs.errors import (
        AuthenticationError,
        ChecksumError,
        ClosedError,
        DegradedError,
        DeviceError,
        DeviceLostError,
        DeviceTimeoutError,
        DlfsError,
        ExistsError,
        FormatError,
        LeaseLostError,
        LimitError,
        LockedError,
        NativeError,
        NotFoundError,
        ServiceLostError,
        SpaceError,
        StaleError,
        TransformError,
        TruncatedError,
        UsageError,
        VersionError,
    )
    from dlfs.ingest.copying import copy_dataset
    from dlfs.reader import Batch, Epoch
    from dlfs.service.client import connect
    from dlfs.store.formatting import format_volume
    from dlfs.store.info import (
        DatasetInfo,
        MemberInfo,
        SampleInfo,
        SuperblockInfo,
        UnfinishedInfo,
        VolumeInfo,
    )
    from dlfs.store.usage import DatasetUsage, VolumeUsage
    from dlfs.views import (
        DatasetView,
        TokenBatch,
        TokenSequences,
        concat,
        length_batches,
        mix,
        select,
        split,
        token_batches,
    )
    from dlfs.volume.comparison import DatasetDiff, diff
    from dlfs.volume.repair import RepairReport, repair
    from dlfs.volume.verification import Finding
    from dlfs.volume.volume import Volume, open

__version__ = "0.1.0"

__all__ = [
    "ArrivingDataset",
    "ArrivingEpoch",
    "AuthenticationError",
    "Batch",
    "ChecksumError",
    "ClosedError",
    "Dataset",
    "DatasetDiff",
    "DatasetInfo",
    "DatasetUsage",
    "DatasetView",
    "DatasetWriter",
    "DegradedError",
    "DeviceError",
    "DeviceLostError",
    "DeviceTimeoutError",
    "DlfsError",
    "Engine",
    "Epoch",
    "ExistsError",
    "Finding",
    "FormatError",
    "Layout",
    "LeaseLostError",
    "LimitError",
    "LockedError",
    "MemberInfo",
    "NativeError",
    "NotFoundError",
    "OnError",
    "Placement",
    "ReadPlan",
    "RepairReport",
    "Replicated",
    "SampleInfo",
    "ServiceLostError",
    "Shuffle",
    "SpaceError",
    "StaleError",
    "SuperblockInfo",
    "TokenBatch",
    "TokenSequences",
    "TransformError",
    "TruncatedError",
    "UnfinishedInfo",
    "UsageError",
    "VersionError",
    "Volume",
    "VolumeInfo",
    "VolumeUsage",
    "concat",
    "connect",
    "copy_dataset",
    "diff",
    "find_placement",
    "format_volume",
    "length_batches",
    "mix",
    "open",
    "repair",
    "select",
    "split",
    "token_batches",
]

_HOMES = {
    "Engine": "dlfs.base.arguments",
    "Layout": "dlfs.base.arguments",
    "OnError": "dlfs.base.arguments",
    "ReadPlan": "dlfs.base.arguments",
    "Shuffle": "dlfs.base.arguments",
    "DatasetDiff": "dlfs.volume.comparison",
    "diff": "dlfs.volume.comparison",
    "ArrivingDataset": "dlfs.dataset.arriving",
    "ArrivingEpoch": "dlfs.dataset.arriving_epoch",
    "Dataset": "dlfs.dataset.dataset",
    "Batch": "dlfs.reader",
    "Epoch": "dlfs.reader",
    "copy_dataset": "dlfs.ingest.copying",
    "connect": "dlfs.service.client",
    "RepairReport": "dlfs.volume.repair",
    "repair": "dlfs.volume.repair",
    "format_volume": "dlfs.store.formatting",
    "DatasetInfo": "dlfs.store.info",
    "MemberInfo": "dlfs.store.info",
    "SampleInfo": "dlfs.store.info",
    "SuperblockInfo": "dlfs.store.info",
    "UnfinishedInfo": "dlfs.store.info",
    "VolumeInfo": "dlfs.store.info",
    "DatasetUsage": "dlfs.store.usage",
    "VolumeUsage": "dlfs.store.usage",
    "Finding": "dlfs.volume.verification",
    "DatasetView": "dlfs.views",
    "TokenBatch": "dlfs.views",
    "TokenSequences": "dlfs.views",
    "concat": "dlfs.views",
    "length_batches": "dlfs.views",
    "mix": "dlfs.views",
    "select": "dlfs.views",
    "split": "dlfs.views",
    "token_batches": "dlfs.views",
    "Volume": "dlfs.volume.volume",
    "open": "dlfs.volume.volume",
    "DatasetWriter": "dlfs.dataset.writer",
    "Replicated": "dlfs.epoch.placement",
    "find_placement": "dlfs.epoch.placement",
    "Placement": "dlfs.epoch.ranks",
}
"""The module of each public name that is no error."""


def __getattr__(name: str) -> object:
    """Load what is public when it is first used (PEP 562)."""
    from importlib import import_module

    if name == "errors":
        return import_module("dlfs.errors")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "dlfs.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
