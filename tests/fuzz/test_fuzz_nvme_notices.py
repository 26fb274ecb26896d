"""Hostile bytes for libdlfs's decoders of the ANA log and the Changed Namespace List: libFuzzer."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.fuzz.test_fuzz_nvme_pdu import built, survives
from tests.support.nvme import AnaState, Namespace
from tests.support.nvme.identify import ana_page

INPUT_BYTES_MAX = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_decoders_survive_hostile_bytes(tmp_path: Path) -> None:
    fuzzer = built("fuzz_nvme_notices", tmp_path)
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    spaces = [Namespace(512, nsid=number) for number in range(1, 6)]
    for space, group in zip(spaces, (1, 1, 2, 3, 3), strict=True):
        space.ana_group = group
    states = {2: AnaState.CHANGE, 3: AnaState.INACCESSIBLE}
    for group in range(1, 5):
        for lists in (False, True):
            log = ana_page(spaces, states, lists=lists)
            (seeds / f"ana{group}{lists:d}").write_bytes(struct.pack("<I", group) + log)
    (seeds / "namespaces").write_bytes(struct.pack("<5I", 7, 3, 5, 7, 0))
    survives(fuzzer, seeds, INPUT_BYTES_MAX, covered_min=20)
