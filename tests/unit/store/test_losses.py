"""Tests that each loss of a member is logged once, and each return."""

from __future__ import annotations

import logging
import uuid

import pytest

import dlfs
from dlfs.block import MemoryDevice
from dlfs.store.losses import loss_of, report_change, report_members
from dlfs.store.members import close_devices
from dlfs.store.recorded import open_members
from dlfs.store.transaction import load_generation


def test_each_loss_and_each_return_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dlfs")
    names = [f"losses-{uuid.uuid4().hex}" for _ in range(2)]
    uris = [f"mem:{name}?size={4 << 20}" for name in names]
    info = dlfs.format_volume(uris, replicas=2)
    devices = open_members(uris)
    generation = load_generation(devices)
    key = info.uuid, info.members[1].uuid
    for _ in range(3):
        report_change(generation, 1, "device is gone")
    assert loss_of(*key) == "device is gone"
    report_change(generation, 1, None)
    report_change(generation, 1, None)
    assert loss_of(*key) is None
    report_change(generation, 1, "no answer")
    report_members(generation)
    assert loss_of(*key) is None
    logged = [
        (record.levelname, record.getMessage().split(uris[1])[1]) for record in caplog.records
    ]
    assert logged == [
        ("WARNING", " was lost: device is gone; the other copies are read"),
        ("INFO", " is back"),
        ("WARNING", " was lost: no answer; the other copies are read"),
        ("INFO", " is back"),
    ]
    close_devices(devices)
    for name in names:
        MemoryDevice.forget(name)
