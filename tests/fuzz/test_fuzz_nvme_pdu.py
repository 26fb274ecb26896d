"""Hostile bytes for libdlfs's NVMe/TCP decoder: libFuzzer from generated seeds.

The harness (native/fuzz) is built with clang in ``build/fuzz``, apart from the other builds. No
corpus is kept: the seeds are honest PDUs, made here. DLFS_FUZZ_RUNS asks for more runs than usual,
of every libFuzzer program; DLFS_FUZZ_SEED for a seed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.test_native import ROOT, run, tool
from tests.support.nvme.pdu import R2T, C2HData, C2HTermReq, CapsuleResp, ICResp, Wire, encode

RUNS = int(os.environ.get("DLFS_FUZZ_RUNS", "50000"))
INPUT_BYTES_MAX = 1024
CLANGS = ["clang", *(f"clang-{version}" for version in range(21, 13, -1))]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def clang_with_libfuzzer(directory: Path) -> str:
    """A clang that links libFuzzer and ASan, or a skip that says what is missing."""
    found = next(filter(None, map(shutil.which, CLANGS)), None)
    if found is None:
        pytest.skip("no clang (package clang)")
    source = directory / "trial.c"
    source.write_text("int LLVMFuzzerTestOneInput(const char *b, long n) { return 0 * b[n]; }\n")
    command = [found, "-fsanitize=fuzzer,address,undefined", source, "-o", directory / "trial"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(
            f"{found} lacks its sanitizers (package libclang-rt-dev): {tried.stderr[-300:]}"
        )
    return found


def built(name: str, directory: Path) -> Path:
    clang = clang_with_libfuzzer(directory)
    folder = ROOT / "build" / "fuzz"
    defines = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DDLFS_TESTS=OFF", "-DDLFS_FUZZ=ON"]
    defines.append(f"-DCMAKE_C_COMPILER={clang}")
    run(tool("cmake"), "-S", str(ROOT / "native"), "-B", str(folder), *defines)
    run(tool("cmake"), "--build", str(folder), "--target", name)
    return folder / "fuzz" / name


def write_seeds(folder: Path) -> None:
    """Streams of a few honest PDUs, in all terms, behind the harness's choices."""
    folder.mkdir()
    pdus = [
        CapsuleResp(bytes(12) + b"\7\0" + bytes(2)),
        C2HData(7, 0, 0, bytes(range(64)), last=False),
        C2HData(7, 0, 64, bytes(512), success=True),
        R2T(7, 1, 0, 4096),
        C2HTermReq(1, 4, bytes(24)),
    ]
    terms = itertools.product([False, True], [False, True], [4, 64])
    for header_digest, data_digest, alignment_bytes in terms:
        wire = Wire(header_digest, data_digest, alignment_bytes)
        choices = bytes([header_digest | data_digest << 1 | 4, alignment_bytes % 7])
        stream = b"".join(encode(pdu, wire) for pdu in pdus)
        name = f"{header_digest:d}{data_digest:d}{alignment_bytes}"
        (folder / name).write_bytes(choices + stream)
        digests = header_digest | data_digest << 1
        (folder / f"ic{name}").write_bytes(choices + encode(ICResp(0, 3, digests, 1 << 17)))


def survives(fuzzer: Path, seeds: Path, input_bytes_max: int, *, covered_min: int = 100) -> None:
    """Run a harness on changed seeds: it ends well, and gets past the first check.

    A shell starts the harness: across exec, Linux counts the peak memory of the parent as that of
    the child, and a process of tests may have had a lot.
    """
    seed = int(os.environ.get("DLFS_FUZZ_SEED", "0")) or int.from_bytes(os.urandom(3), "little") + 1
    options = [f"-runs={RUNS}", f"-seed={seed}", f"-max_len={input_bytes_max}", "-timeout=100"]
    options += ["-rss_limit_mb=1024", f"-artifact_prefix={seeds.parent}/"]
    command = ["sh", "-c", '"$@"; exit $?', "sh", fuzzer, *options, seeds]
    done = subprocess.run(command, cwd=seeds.parent, capture_output=True, text=True)
    assert done.returncode == 0, f"DLFS_FUZZ_SEED={seed}:\n{done.stderr[-4000:]}"
    assert re.search(rf"Done {RUNS} runs", done.stderr)
    covered = [int(count) for count in re.findall(r"cov: (\d+)", done.stderr)]
    assert max(covered) > covered_min, "the seeds do not get past the first check"


def test_the_decoder_survives_hostile_bytes(tmp_path: Path) -> None:
    fuzzer = built("fuzz_nvme_pdu", tmp_path)
    seeds = tmp_path / "seeds"
    write_seeds(seeds)
    survives(fuzzer, seeds, INPUT_BYTES_MAX)
