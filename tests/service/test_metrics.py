"""Tests the statistics of a service in use: Prometheus, ``dlfs top`` and ``dlfs stall``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest

import dlfs
from dlfs.service.client import get_statistics
from dlfs.service.statistics import Activity, verdict
from tests.service.serving import Service
from tests.support.waiting import wait_for


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlfs.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def busy(serve, volume):
    """Start a service, read its dataset once, and keep the client connected."""
    service = serve(volume, options=("--metrics", "127.0.0.1:0"))
    with dlfs.connect(service.uri) as connected, connected["d"] as dataset:
        for batch in dataset.batches(50):
            batch.release()
        yield service


def test_prometheus_counts_the_samples_that_were_read(busy: Service, samples) -> None:
    found = re.search(r"metrics on (http://\S+)", busy.log.read_text())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=30) as answer:
        text = answer.read().decode()
    counted = re.search(r'^dlfs_samples_total\{dataset="d".*\} (\S+)$', text, re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) == len(samples)
    assert re.search(r"^dlfs_member_read_seconds_count\{.*\} [1-9]", text, re.MULTILINE)
    assert re.search(r"^dlfs_client_samples_total\{.*\} [1-9]", text, re.MULTILINE)
    assert "dlfs_clients 1.0" in text


def test_top_shows_datasets_members_and_clients(busy: Service, volume, samples) -> None:
    shown = json.loads(run_cli("top", busy.uri, "--json").stdout)
    (dataset,) = shown["datasets"]
    assert dataset["dataset"] == "d"
    assert dataset["reader"]["samples"] == len(samples)
    assert sum(dataset["members"][0]["latency"]) == dataset["reader"]["reads"] > 0
    done = run_cli("top", busy.uri, "--interval", 0.1)
    assert done.returncode == 0, done.stderr
    for word in ("serving images", "d@1", volume, "in flight", "callers"):
        assert word in done.stdout


def test_stall_through_a_service(busy: Service, samples) -> None:
    done = run_cli("stall", busy.uri, "d", "--seconds", 0.2, "--batch", 50, "--json")
    found = json.loads(done.stdout)
    assert found["samples"] >= 50
    measured = Activity(**{field.name: found[field.name] for field in fields(Activity)})
    assert found["verdict"] == verdict(measured, found["waited_seconds"] / found["seconds"])
    refused = run_cli("stall", busy.uri, "d", "--memory", "1MiB")
    assert refused.returncode == 2
    assert "the service's to choose; leave --memory out" in refused.stderr


def test_verbs_that_read_take_a_service(busy: Service, samples, tmp_path: Path) -> None:
    assert json.loads(run_cli("ls", busy.uri, "--json").stdout)["datasets"][0]["name"] == "d"
    path, data = next((path, data) for path, data in samples.items() if data)
    command = [sys.executable, "-m", "dlfs.cli", "cat", busy.uri, "d", path.decode()]
    assert subprocess.run(command, capture_output=True, timeout=120).stdout == data
    assert run_cli("stat", busy.uri, "d", path.decode()).returncode == 0
    assert "images" in run_cli("info", busy.uri).stdout
    assert run_cli("export", busy.uri, "d", tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy" / path.decode()).read_bytes() == data
    assert run_cli("rm", busy.uri, "d", "--yes").returncode == 2


def test_a_client_that_went_is_not_shown(serve, volume) -> None:
    service = serve(volume)
    with dlfs.connect(service.uri) as connected, connected["d"] as dataset:
        dataset.read([0, 1]).release()
        assert get_statistics(service.uri)["datasets"][0]["users"] == 1
    wait_for(lambda: len(get_statistics(service.uri)["clients"]) == 1, "the client to be forgotten")


def test_statistics_of_a_service_that_is_not_running_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(dlfs.ServiceLostError):
        get_statistics(f"unix:{tmp_path}/none.sock", timeout_s=0.1)
