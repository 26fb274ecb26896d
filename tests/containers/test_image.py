"""What the image has: its size and parts, the README's commands, the doctor, its health check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.containers.podman import Podman, allow_uring
from tests.support.documents import ROOT

pytestmark = [pytest.mark.containers]

SIZE_BYTES_MAX = 200_000_000

README = """
import sys
from pathlib import Path
sys.path.insert(0, "/readme")
from examples import Installation, run_example, sections
folder = Path(".")
for title, blocks in sections("README.md", Path("/readme/README.md").read_text()):
    if any(title.endswith(wanted) for wanted in WANTED):
        for language, block in blocks:
            run_example(language, block, folder, Installation(python=Path(sys.executable)))
        print(title)
"""
SAMPLES = "Samples to try it with"


def test_its_size_labels_and_user(podman: Podman) -> None:
    (image,) = json.loads(podman("image", "inspect", podman.image).stdout)
    assert image["Size"] < SIZE_BYTES_MAX
    labels = image["Labels"]
    version = podman.image.rpartition(":")[2]
    assert labels["org.opencontainers.image.version"] == version
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert image["Config"]["Entrypoint"] == ["dlfs"]
    assert image["Config"]["User"] == "10001:10001"
    assert f"dlfs {version}" in podman.run("version").stdout


def test_no_compiler_and_nothing_of_the_build(podman: Podman) -> None:
    look = (
        "command -v cc gcc c++ g++ clang ld as make pip; "
        "ls /opt/pip /wheels /run/secrets /etc/pip.conf /packages; "
        "find / -xdev -name cc1 -o -xdev -name '*.whl'; true"
    )
    done = podman.run("-c", look, options=["--entrypoint", "sh"])
    assert done.stdout == ""


def test_the_list_of_its_parts(podman: Podman) -> None:
    text = podman.run("/opt/dlfs/sbom.json", options=["--entrypoint", "cat"]).stdout
    names = {each["name"] for each in json.loads(text)["components"]}
    assert {"dlfs-storage", "numpy", "s3fs", "libc6", "fuse3", "openssl", "liburing"} <= names
    query = ["-W", "-f", "${Package}\n"]
    packages = podman.run(*query, options=["--entrypoint", "dpkg-query"]).stdout.split()
    assert set(packages) <= names


@pytest.mark.parametrize(
    ("wanted", "root"),
    [
        ((SAMPLES, "In Python", "One service for a machine"), False),
        ((SAMPLES, "Through a mount"), True),
    ],
)
def test_the_readme_runs_in_it(
    podman: Podman, shared: Path, wanted: tuple[str, ...], root: bool
) -> None:
    files = (ROOT / "README.md", ROOT / "tests/support/examples.py")
    options: list[object] = [f"--volume={path}:/readme/{path.name}:ro" for path in files]
    options += [f"--volume={shared}:/work", "--workdir", "/work"]
    done = podman.python(f"WANTED = {wanted}\n{README}", options=options, root_for_mounts=root)
    assert done.stdout.splitlines() == [f"README.md: {title}" for title in _ordered(wanted)]


def _ordered(wanted: tuple[str, ...]) -> list[str]:
    return sorted(wanted, key=(ROOT / "README.md").read_text().index)


def test_the_doctor_finds_nothing(podman: Podman, tmp_path: Path) -> None:
    profile = allow_uring(tmp_path / "dlfs.json")
    done = podman.run("doctor", options=[f"--security-opt=seccomp={profile}"], check=False)
    assert done.returncode == 0, done.stdout
    assert "0 errors, 0 warnings" in done.stdout


def test_the_doctor_tells_of_a_profile_without_io_uring(podman: Podman) -> None:
    done = podman.run("doctor", "--json", check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert "seccomp" in found["io_uring"]["fix"]


def test_the_health_check(podman: Podman, shared: Path) -> None:
    """podman has systemd run it; here it is run by hand."""
    volume = "/data/v.img"
    options = [f"--volume={shared}:/data", "--env=DLFS_SERVICE=unix:/data/s.sock"]
    podman.run("format", volume, "--size", "16MiB", options=options)
    (image,) = json.loads(podman("image", "inspect", podman.image).stdout)
    kind, command = image["Healthcheck"]["Test"]
    assert kind == "CMD-SHELL"
    with podman.start("serve", volume, "--socket", "/data/s.sock", options=options) as container:
        container.wait_running("sh", "-c", command)
        container.do("pause")
        container.do("unpause")
        assert container.run("sh", "-c", f"DLFS_MOUNT=/absent; {command}", check=False).returncode
        assert container.run("sh", "-c", f"DLFS_SERVICE=unix:/x; {command}", check=False).returncode
        container.do("stop", "--time", "20")
        assert container.state["ExitCode"] == 0, container.logs()
    assert not list(shared.glob("s.sock*"))
