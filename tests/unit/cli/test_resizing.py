"""``dlfs grow`` and ``dlfs shrink``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlfs.cli.exits import ExitCode
from tests.support.volumes import write_dataset

Run = Callable[..., Any]


def test_a_volume_is_moved_to_other_devices(tmp_path: Path, run: Run) -> None:
    old, new = str(tmp_path / "old.img"), str(tmp_path / "new.img")
    assert run("format", old, "--size", "4MiB", "--chunk", "16KiB").code == 0
    write_dataset(old, "data", {f"{i}": bytes([i]) * 1000 for i in range(40)})
    done = run("shrink", old, "0")
    assert done.code == ExitCode.USAGE
    assert "'dlfs grow' adds a group" in done.err
    done = run("grow", old, new)
    assert done.code == ExitCode.USAGE
    assert "--size 1GiB" in done.err
    done = run("grow", old, new, "--size", "4MiB", "--json")
    assert (done.code, [m["uri"] for m in done.json["members"]]) == (0, [old, new])
    assert "grown to 2 members" in done.err
    done = run("shrink", old, old, "--json")
    assert (done.code, done.json["removed"], done.json["uri"]) == (0, [old], new)
    assert done.json["moved_bytes"] > 40_000
    assert f"removed {old}" in done.err
    assert run("verify", new).code == 0
    assert run("ls", old, "data").out.count(b"\n") == 40
