"""How the benchmark of a cluster puts logs of ranks together; the cluster itself takes minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.orders import check_order, read_logs, trained_order
from bench.errors import BenchmarkError


def step(position: int, rank: int, ranks: int, indices: list[int]) -> dict[str, Any]:
    return {"position": position, "rank": rank, "ranks": ranks, "indices": indices}


def test_the_last_attempt_at_a_position_counts(tmp_path: Path) -> None:
    """Two ranks log two steps; the second was not saved, and one rank trains it again."""
    logs = {
        "100-0": [step(0, 0, 2, [5, 4]), step(4, 0, 2, [9, 9])],
        "101-1": [step(0, 1, 2, [6, 3]), step(4, 1, 2, [9, 9])],
        "99999-0": [step(4, 0, 1, [0, 1, 2, 7])],
    }
    for name, steps in logs.items():
        lines = "".join(f"{json.dumps(one)}\n" for one in steps)
        (tmp_path / f"{name}.jsonl").write_text(f'{lines}{{"position": 8, "ra')  # killed
    found = trained_order(read_logs(tmp_path), 8)
    assert found == [5, 6, 4, 3, 0, 1, 2, 7]
    check_order(found, [5, 6, 4, 3, 0, 1, 2, 7])
    with pytest.raises(BenchmarkError, match="position 6: expected sample 3, got 2"):
        check_order(found, [5, 6, 4, 3, 0, 1, 3, 7])


def test_what_nobody_trained_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="nobody trained position 1 of 4"):
        trained_order([[step(0, 0, 2, [1, 2])]], 4)
    with pytest.raises(BenchmarkError, match="rank 1 trained position 5"):
        trained_order([[step(0, 1, 2, [1, 2, 3])]], 4)
