"""Which command installs the packages of an extra."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dlfs.base.extras import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[3]
METADATA = f"""Metadata-Version: 2.1
Name: {DISTRIBUTION}
Version: 9.9
Requires-Dist: numpy>=1.26
Requires-Dist: trio>=0.25; extra == "service"
Requires-Dist: prometheus-client>=0.19 ; extra == 'service'
Requires-Dist: {DISTRIBUTION}[service]; extra == "mount"
Requires-Dist: {DISTRIBUTION}[mount,service]; extra == "all"
Requires-Dist: old; python_version < "3" and extra == "all"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed distribution's metadata."""
    folder = tmp_path / f"{DISTRIBUTION.replace('-', '_')}-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_the_packages_are_named_with_their_versions(installed):
    assert install_command("service") == "pip install 'trio>=0.25' 'prometheus-client>=0.19'"
    assert install_command("mount") == install_command("service")


def test_a_package_is_named_once(installed):
    assert install_command("all") == install_command("service") + " old"


def test_the_tool_that_installed_this_copy_is_named(installed):
    (installed / "INSTALLER").write_text("uv\n")
    assert install_command("service").startswith("uv pip install 'trio>=0.25'")
    (installed / "INSTALLER").write_text("pip\n")
    assert install_command("service").startswith("pip install ")


def test_a_checkout_that_was_never_installed_is_named_itself(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(DISTRIBUTION)
    assert install_command("torch") == f"pip install {shlex.quote(f'{ROOT}[torch]')}"


def test_extras_in_error_texts_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    extras = project["optional-dependencies"]
    files = [*(ROOT / "dlfs").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"install_command\(['\"]([a-z0-9]+)['\"]\)", text))
    named |= set(re.findall(r"\bextra=['\"]([a-z0-9]+)['\"]", text))
    assert {"torch", "arrow", "hdf5"} <= named <= set(extras)
    assert not re.search(r"pip install '?dlfs\b", text)


def test_the_mount_compiles_nothing_of_its_own():
    """The packages of [mount] all have wheels; pyfuse3, which has none, has an extra of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert extras["mount"] == [f"{DISTRIBUTION}[service]"]
    assert not any("pyfuse3" in package for package in extras["service"])


def test_a_missing_torch_says_what_to_install(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import dlfs.adapters.torch"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    command = install_command("torch")
    assert done.stderr.splitlines()[-1].endswith(f"expected PyTorch to be installed: {command}")
