"""The systemd units of the node service and of mounts: systemd accepts them, and they work."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dlfs
from dlfs.base.units import MIB
from dlfs.cli.commands import app
from dlfs.mount.mountpoint import find_mount
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.keeper import can_keep
from tests.fuse.mounting import add_dataset, run_cli

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze (package systemd)")
    units = []
    for template in UNITS.iterdir():
        units.append(tmp_path / template.name.replace("@", "@images"))
        shutil.copy(template, units[-1])
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, units)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "dlfs" in line]) == (
        0,
        [],
    )


@pytest.mark.fuse
def test_the_unit_of_a_mount_mounts(tmp_path: Path) -> None:
    """Its commands, run as systemd runs them: a word for each word of $NAME, one for ${NAME}."""
    volume, directory = tmp_path / "volume.img", tmp_path / "a mount"
    dlfs.format_volume(str(volume), size_bytes=16 * MIB)
    add_dataset(volume, "train", {b"a": b"first" * 100})
    directory.mkdir()
    values = {"MOUNT_OPTIONS": "--no-uring --quiet", "VOLUME": str(volume)}
    values["MOUNT"] = str(directory)

    def run(kind: str) -> None:
        lines = (UNITS / "dlfs-mount@.service").read_text().splitlines()
        (line,) = [line.partition("=")[2] for line in lines if line.startswith(f"{kind}=")]
        words: list[str] = []
        for word in shlex.split(line.removeprefix("-"))[2:]:
            name = word.strip("${}")
            whole = word.startswith("${") or not word.startswith("$")
            value = values[name] if word.startswith("$") else word
            words += [value] if whole else value.split()
        done = run_cli(*words)
        assert done.returncode == 0, done.stderr

    run("ExecStart")
    try:
        assert (directory / "train/a").read_bytes() == b"first" * 100
        if can_keep(MountOptions(uring=False)):
            run("ExecReload")
            assert (directory / "train/a").read_bytes() == b"first" * 100
    finally:
        run("ExecStop")
    assert find_mount(directory) is None


def test_the_units_start_existing_verbs() -> None:
    lines = (UNITS / "dlfs-serve@.service").read_text().splitlines()
    (start,) = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
    words = shlex.split(start)
    assert words[:3] == ["/usr/bin/env", "dlfs", "serve"]
    output = CliRunner().invoke(app, [words[2], "--help"])
    assert output.exit_code == 0
    assert "--cache" in output.output
