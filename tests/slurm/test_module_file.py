"""The module file, by an interpreter of Lua that prints what Lmod would do."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.slurm.lab import ROOT


@pytest.mark.skipif(shutil.which("lua5.4") is None, reason="no lua5.4")
def test_the_module_file_sets_the_paths() -> None:
    path = ROOT / "deploy" / "slurm" / "modulefile.lua"
    code = "for _, name in ipairs{'help', 'whatis', 'prepend_path', 'setenv'} do "
    code += "_G[name] = function(...) print(name, ...) end end "
    code += f"dofile({str(path)!r})"
    done = subprocess.run(["lua5.4", "-e", code], capture_output=True, text=True, check=True)
    assert "setenv\tDLFS_SLURM\t/opt/dlfs/slurm" in done.stdout
    assert "prepend_path\tPATH\t/opt/dlfs/bin" in done.stdout
