"""Builds the C tests and runs them: under ASan with UBSan, and under TSan.

Each build stays in ``build/``, so that the next run compiles what has changed. Bugs planted on
purpose prove that each sanitizer would notice.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = str(os.cpu_count() or 1)
TESTS = str(2 * (os.cpu_count() or 1))  # some wait for time-outs

BUILDS = {"address": "address,undefined", "thread": "thread"}

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGES_RESERVED = 64
HUGE_PAGE_TESTS = "memory|test_channel$|fuse_mount"

PLANTED = [
    ("address", "heap_overflow", "heap-buffer-overflow"),
    ("address", "signed_overflow", "signed integer overflow"),
    ("thread", "data_race", "data race"),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def tool(name: str) -> str:
    """A program of the virtual environment, else of the machine."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}"


def configure(build: str) -> Path:
    folder = ROOT / "build" / f"test-{build}"
    defines = ["-DDLFS_TESTS=ON", f"-DDLFS_SANITIZE={BUILDS[build]}"]
    run(tool("cmake"), "-S", str(ROOT / "native"), "-B", str(folder), *defines)
    return folder


def compile_target(folder: Path, target: str) -> None:
    run(tool("cmake"), "--build", str(folder), "--parallel", JOBS, "--target", target)


def without_randomization() -> list[str]:
    """TSan's shadow has fixed places, which an address space laid out at random may occupy."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return []
    command = [setarch, os.uname().machine, "--addr-no-randomize"]
    tried = subprocess.run([*command, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return command if tried.returncode == 0 else []


@pytest.mark.parametrize("build", BUILDS)
def test_c_tests_pass(build: str) -> None:
    folder = configure(build)
    compile_target(folder, "all")
    options = ["--test-dir", str(folder), "--parallel", TESTS, "--output-on-failure"]
    run(*without_randomization(), tool("ctest"), *options)


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Reserve huge pages of 2 MiB; machines reserve none unless they are configured to."""
    before = HUGE_PAGES.read_text()
    try:
        HUGE_PAGES.write_text(str(int(before) + HUGE_PAGES_RESERVED))
    except OSError as error:
        pytest.skip(f"cannot reserve huge pages: {error}")
    try:
        if int(HUGE_PAGES.read_text()) < int(before) + HUGE_PAGES_RESERVED:
            pytest.skip(f"the kernel has no {HUGE_PAGES_RESERVED} huge pages to reserve")
        yield
    finally:
        HUGE_PAGES.write_text(before)


@pytest.mark.usefixtures("huge_pages")
def test_c_tests_pass_with_reserved_huge_pages() -> None:
    """Run tests of what maps shared memory: the memory itself, the service and the mount.

    Threads do the same as on small pages, so the build with ThreadSanitizer is left out.
    """
    folder = configure("address")
    compile_target(folder, "all")
    options = ["--test-dir", str(folder), "--parallel", TESTS, "--output-on-failure"]
    run(*without_randomization(), tool("ctest"), *options, "--tests-regex", HUGE_PAGE_TESTS)


@pytest.mark.parametrize(("build", "bug", "message"), PLANTED)
def test_planted_bug_is_noticed(build: str, bug: str, message: str) -> None:
    folder = configure(build)
    compile_target(folder, f"planted_{bug}")
    program = str(folder / "tests" / f"planted_{bug}")
    command = [*without_randomization(), program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
