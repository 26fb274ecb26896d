"""The workloads: DLIO's own configurations, scaled to fit a small machine.

Each workload starts from a file of DLIO (``configs/workload``), and options not named here have the
values of that file. Sizes and times are scaled. ``record_bytes``, batch size and threads have the
original's proportions, and ``computation_seconds`` sets the rate that the accelerator takes. In
those named ``*-official``, files and threads are as in DLIO's file, and their number is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WAYS = ("ext4", "mount", "plugin")
PLUGIN = "bench.dlio.plugin.DlfsDataLoader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training load.

    Attributes:
        name: name of the workload and of its dataset.
        about: description of one line.
        base: name of DLIO's configuration that it starts from.
        format: format of the files: ``tfrecord``, ``jpeg`` or ``npz``.
        files: number of files that are trained on.
        quick_files: number of files with ``--quick``.
        samples_per_file: records of a file.
        record_bytes: mean length of a record in bytes; for JPEG, in pixels.
        batch_size: samples of a batch.
        computation_seconds: time that a batch occupies the accelerator.
        threads: number of DLIO's readers in each rank: worker processes of PyTorch, or threads.
        options: further options of DLIO, below ``workload.``.
    """

    name: str
    about: str
    base: str
    format: str
    files: int
    quick_files: int
    samples_per_file: int = 1
    record_bytes: int
    batch_size: int
    computation_seconds: float
    threads: int = 2
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def records(self) -> bool:
        """True if samples are records instead of files, for the sample API."""
        return self.format == "tfrecord"

    def options_of(
        self, folder: Path, output: Path, *, files: int, ranks: int, seed: int
    ) -> list[str]:
        """Return DLIO's command line, except for its actions."""
        values: dict[str, object] = {
            "workflow.checkpoint": False,
            "dataset.data_folder": folder,
            "dataset.format": self.format,
            "dataset.num_files_train": files,
            # Nothing is evaluated, but DLIO divides by the number of files of each of its threads.
            "dataset.num_files_eval": self.threads * ranks,
            "dataset.num_samples_per_file": self.samples_per_file,
            "dataset.record_length": self.record_bytes,
            "reader.batch_size": self.batch_size,
            "reader.read_threads": self.threads,
            "reader.computation_threads": self.threads,
            "train.computation_time": self.computation_seconds,
            "train.seed": seed,
            "output.folder": output,
            **self.options,
        }
        words = [f"++workload.{name}={value}" for name, value in values.items()]
        return [f"workload={self.base}", f"hydra.run.dir={output}", *words]


WORKLOADS = (
    Workload(
        name="resnet50-tfrecord",
        about="ImageNet-like records in TFRecord files",
        base="resnet50_a100",
        format="tfrecord",
        files=32,
        quick_files=8,
        samples_per_file=128,
        record_bytes=114_660,
        batch_size=64,
        computation_seconds=0.0696,
    ),
    Workload(
        name="resnet50-jpeg",
        about="ImageNet-like JPEG files, decoded",
        base="resnet50_a100",
        format="jpeg",
        files=4096,
        quick_files=1024,
        record_bytes=114_660,
        batch_size=64,
        computation_seconds=0.16,
        options={"framework": "pytorch", "reader.data_loader": "pytorch"},
    ),
    Workload(
        name="cosmoflow-tfrecord",
        about="one large record in each TFRecord file",
        base="cosmoflow_a100",
        format="tfrecord",
        files=512,
        quick_files=128,
        record_bytes=2_828_486,
        batch_size=1,
        computation_seconds=0.00551,
    ),
    Workload(
        name="unet3d-npz",
        about="NPZ volumes of very different sizes",
        base="unet3d_a100",
        format="npz",
        files=84,
        quick_files=28,
        record_bytes=9_162_539,
        batch_size=4,
        computation_seconds=0.0727,
        options={
            "dataset.record_length_stdev": 4_271_363,
            "dataset.record_length_resize": 131_072,
        },
    ),
    Workload(
        name="resnet50-official",
        about="ImageNet-like records in TFRecord files of 137 MiB",
        base="resnet50_a100",
        format="tfrecord",
        files=16,
        quick_files=8,
        samples_per_file=1251,
        record_bytes=114_660,
        batch_size=400,
        computation_seconds=0.435,
        threads=8,
    ),
    Workload(
        name="unet3d-official",
        about="NPZ volumes of 147 MB, of very different sizes",
        base="unet3d_a100",
        format="npz",
        files=28,
        quick_files=8,
        record_bytes=146_600_628,
        batch_size=1,
        computation_seconds=0.291,
        threads=4,
        options={
            "dataset.record_length_stdev": 68_341_808,
            "dataset.record_length_resize": 2_097_152,
        },
    ),
)
