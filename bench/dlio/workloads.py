"""The workloads: DLIO's own configurations, with what is changed to fit a machine.

Each starts from a file that DLIO brings (``configs/workload``), so everything not named here is as
its authors have it. Sizes and times are scaled: ``record_bytes``, batch size and threads keep the
original's proportions, ``computation_seconds`` sets the load that a batch offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WAYS = ("ext4", "mount", "plugin")
READ_THREADS = 2
"""DLIO's readers in each rank: worker processes of PyTorch, or threads."""
PLUGIN = "bench.dlio.plugin.DlfsDataLoader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training load.

    Attributes:
        name: of it, and of its dataset.
        about: one line.
        base: DLIO's configuration that it starts from.
        format: of the files: ``tfrecord``, ``jpeg`` or ``npz``.
        files: that are trained on.
        quick_files: likewise, with ``--quick``.
        samples_per_file: records in each.
        record_bytes: mean length of one; of JPEG, pixels.
        batch_size: samples.
        computation_seconds: that a batch keeps the accelerator busy.
        options: further ones of DLIO, under ``workload.``.
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
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def records(self) -> bool:
        """Whether the sample API reads records instead of files."""
        return self.format == "tfrecord"

    def offered(self) -> float:
        """Samples/s that the accelerator would take."""
        return self.batch_size / self.computation_seconds

    def options_of(
        self, folder: Path, output: Path, *, files: int, ranks: int, seed: int
    ) -> list[str]:
        """DLIO's command line, without what it shall do.

        Args:
            folder: of the data.
            output: where DLIO writes what it measured.
            files: that are trained on.
            ranks: of MPI.
            seed: of its orders.
        """
        values: dict[str, object] = {
            "workflow.checkpoint": False,
            "dataset.data_folder": folder,
            "dataset.format": self.format,
            "dataset.num_files_train": files,
            # Nothing is evaluated, but DLIO lists valid/, and a directory without files is no part
            # of a sealed dataset; and it divides by what each of its threads would have.
            "dataset.num_files_eval": READ_THREADS * ranks,
            "dataset.num_samples_per_file": self.samples_per_file,
            "dataset.record_length": self.record_bytes,
            "reader.batch_size": self.batch_size,
            "reader.read_threads": READ_THREADS,
            "reader.computation_threads": READ_THREADS,
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
)
