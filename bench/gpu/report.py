"""The report of the GPU benchmark: a table for each size of samples, and how to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.gpu.feeds import FEEDS, worker_count
from bench.gpu.measuring import Result, size_of
from bench.report import Report, Table, number_text
from dlfs.base.units import GIB, MIB, format_bytes

COLUMNS = (
    "feed",
    "samples/s",
    "MiB/s",
    "CPU us/sample",
    "steps waited",
    "step ms",
    "first epoch, samples/s",
    "notes",
)


@dataclass(slots=True)
class Findings:
    """What was measured.

    Attributes:
        device: facts of the device.
        results: results of each feed by its name, in the order of the sizes.
        missing: why a feed lacks results, by its name and the key of the size.
        logs: end of the log of each feed that failed.
    """

    device: Mapping[str, Any] = field(default_factory=dict)
    results: dict[str, list[Result]] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)


def _row(name: str, result: Result | None, missing: str) -> list[str]:
    if result is None:
        return [name, "-", "-", "-", "-", "-", "-", missing or "not measured"]
    first = result.first_samples_per_s
    return [
        name,
        number_text(result.samples_per_s),
        number_text(result.samples_per_s * size_of(result.size).length / MIB),
        number_text(result.cpu_us_per_sample),
        f"{result.waited_share:.1%}",
        number_text(result.step_ms),
        "-" if first is None else number_text(first),
        "; ".join(result.notes),
    ]


def table_of(key: str, findings: Findings) -> Table:
    """Return the table of one size."""
    found = {
        name: next((one for one in results if one.size == key), None)
        for name, results in findings.results.items()
    }
    size = size_of(key)
    batch = next((one.batch for one in found.values() if one is not None), size.batch)
    rows = [
        _row(feed.name, found.get(feed.name), findings.missing.get(feed.name, {}).get(key, ""))
        for feed in FEEDS
        if feed.name in findings.results
    ]
    return Table(f"Samples of {format_bytes(size.length)}, batches of {batch}", COLUMNS, rows)


def _device_line(facts: Mapping[str, Any]) -> str:
    words = [str(facts.get("gpu", "unknown"))]
    if "gpu_memory_bytes" in facts:
        words += [
            f"{facts['gpu_memory_bytes'] / GIB:.0f} GiB",
            f"driver {facts['driver'] or 'unknown'}, CUDA {facts['cuda']}",
            f"copies from page-locked memory {facts['copy_gib_per_s']:.1f} GiB/s",
        ]
    return f"- GPU: {', '.join(words)}; PyTorch {facts.get('torch', 'unknown')}"


def make_report(
    facts: Mapping[str, Any], arguments: Mapping[str, str], sizes: tuple[str, ...], found: Findings
) -> Report:
    """Return the report of a run."""
    data = {
        "arguments": dict(arguments),
        "device": dict(found.device),
        "results": {name: [asdict(one) for one in some] for name, some in found.results.items()},
        "missing": dict(found.missing),
        "logs": dict(found.logs),
        "workers": worker_count(),
    }
    report = Report("gpu", "Into a GPU's memory", facts, data)
    report.add(
        _device_line(found.device),
        "Later epochs, with all samples in memory (the page cache, or the sample memory of DLFS). "
        "`samples/s` ends when the last copy has arrived. CPU time is that of all processes. "
        "`steps waited` is the share of a training's time from the end of one step of a small "
        "convnet until the next batch lies on the device. The first epoch begins with dropped "
        f"caches and includes the start of workers, of which the peers have {worker_count()}.",
        *(table_of(key, found) for key in sizes),
        "\n".join(f"- {feed.name}: {feed.about}" for feed in FEEDS if feed.name in found.results),
    )
    return report
