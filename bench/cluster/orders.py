"""Puts the logs of all ranks and attempts together to the order in which an epoch was trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchmarkError

Step = dict[str, Any]


def read_logs(folder: Path) -> list[list[Step]]:
    """Return the steps of each attempt of each rank, attempts in the order of their begin."""
    paths = sorted(folder.glob("*-*.jsonl"), key=lambda path: int(path.name.partition("-")[0]))
    return [_read(path) for path in paths]


def _read(path: Path) -> list[Step]:
    """Return the lines of a log; a rank that was killed leaves the last one in part."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trained_order(logs: Iterable[Sequence[Step]], total: int) -> list[int]:
    """Return the index at each position of the epoch, as the last attempt at it trained it.

    Args:
        logs: steps of each rank in each attempt, earlier attempts first.
        total: samples of the epoch.

    Raises:
        BenchmarkError: no rank trained a position, or one trained a position behind the last.
    """
    order = [-1] * total
    for steps in logs:
        for step in steps:
            for number, index in enumerate(step["indices"]):
                position = step["position"] + step["rank"] + number * step["ranks"]
                if position >= total:
                    raise BenchmarkError(f"rank {step['rank']} trained position {position}")
                order[position] = index
    if -1 in order:
        raise BenchmarkError(f"nobody trained position {order.index(-1)} of {total}")
    return order


def check_order(order: Sequence[int], expected: Sequence[int]) -> None:
    """Check that an epoch was trained in its order.

    Raises:
        BenchmarkError: it was not; the message names the first position.
    """
    for position, (got, wanted) in enumerate(zip(order, expected, strict=True)):
        if got != wanted:
            raise BenchmarkError(f"position {position}: expected sample {wanted}, got {got}")
