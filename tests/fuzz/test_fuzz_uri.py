"""Hostile text for libdlfs's parser of device URIs: libFuzzer from the cases of both parsers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.test_fuzz_nvme_pdu import built, survives
from tests.unit.block.uris import ACCEPTED, REFUSED

INPUT_BYTES_MAX = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_parser_survives_hostile_text(tmp_path: Path) -> None:
    fuzzer = built("fuzz_uri", tmp_path)
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for number, (text, _) in enumerate([*ACCEPTED, *REFUSED]):
        (seeds / str(number)).write_bytes(text.encode("utf-8", "surrogatepass"))
    survives(fuzzer, seeds, INPUT_BYTES_MAX)
