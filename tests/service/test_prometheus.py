"""Alerts of deploy/prometheus: on a real Prometheus, whose minutes are seconds, each fires for its
cause alone."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import DlfsError, LimitError
from dlfs.service.metrics import SnapshotCollector
from tests.service.serving import Service, damage, make_samples, make_volume
from tests.support.nvme import Event, Fault, FaultScript, Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.faults import Complete, Delay
from tests.support.nvme.script import Action
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/dlfs.rules.yml"
SAMPLES = make_samples(200)
QUIET_S = 8.0
"""Time in which an alert without a cause would fire: the longest range and delay of a rule."""
UNRECOVERED_READ = 0x281


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


# ---- without Prometheus --------------------------------------------------------------------------


def test_rules_use_metrics_that_there_are(metric_names: set[str]) -> None:
    for rule in rules():
        used = set(re.findall(r"\bdlfs_\w+", rule["expr"]))
        assert used or "up{" in rule["expr"]
        assert used <= metric_names, rule["alert"]


def test_each_alert_has_an_entry_in_the_documentation() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for rule in rules():
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{anchor}"
        assert f"\n### {rule['alert']}\n" in text


def test_the_dashboard_uses_metrics_that_there_are(metric_names: set[str]) -> None:
    queries = dashboard_queries()
    assert len(queries) > 10
    for query in queries:
        assert set(re.findall(r"\bdlfs_\w+", query)) <= metric_names, query


def dashboard_queries() -> list[str]:
    dashboard = json.loads((ROOT / "deploy/grafana/dlfs.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


@pytest.fixture(scope="module")
def metric_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of all time series that a service has."""
    folder = tmp_path_factory.mktemp("names")
    volume = make_volume(folder / "v.img", SAMPLES)
    service = Service([volume], folder / "s.sock").wait_ready()
    try:
        with dlfs.connect(service.uri) as connected, connected["d"] as dataset:
            dataset.read([0]).release()
            snapshot = service.snapshot()
    finally:
        service.close()
    return {sample.name for metric in _metrics(snapshot) for sample in metric.samples}


def _metrics(snapshot: dict[str, Any]) -> Iterator[Metric]:
    return SnapshotCollector(lambda: snapshot).collect()


# ---- with Prometheus -----------------------------------------------------------------------------


class Prometheus:
    """Prometheus with our rules, whose minutes are seconds, watching one service."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir()
        fast = re.sub(r"\b([0-9]+)m\b", r"\1s", RULES.read_text())
        (folder / "rules.yml").write_text(fast)
        scrape = {"job_name": "dlfs", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        config = {
            "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._url = f"127.0.0.1:{free_port()}"
        arguments = ["prometheus", "--config.file", str(folder / "prometheus.yml")]
        arguments += [
            "--storage.tsdb.path",
            str(folder / "data"),
            "--web.listen-address",
            self._url,
        ]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(arguments, stdout=self._log, stderr=self._log)
        try:
            wait_for(self._sees, "Prometheus to see the service")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the result of a query."""
        found = self._get("query?" + urllib.parse.urlencode({"query": text}))
        return list(found["result"])

    def started_s(self) -> float:
        """Return the time at which the service started, as last scraped; 0 if not lately."""
        found = self.query("dlfs_start_time_seconds")
        return float(found[0]["value"][1]) if found else 0.0

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self._get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def expect(self, *names: str, also: tuple[str, ...] = ()) -> None:
        """Wait until these alerts fire; no other may, except those that may come with them."""
        expected = set(names)

        def all_fire() -> bool:
            found = self.firing()
            assert found <= expected | set(also)
            return expected <= found

        wait_for(all_fire, f"the alerts {', '.join(names)}")

    def expect_none(self) -> None:
        """Check for a time that no alert fires."""
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            assert self.firing() == set()
            time.sleep(0.2)

    def _sees(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.query("dlfs_start_time_seconds"))
        return False

    def _get(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self._url}/api/v1/{what}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return dict(found["data"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Training:
    """Reads epochs of a service's dataset until it is closed."""

    def __init__(self, uri: str, read: Callable[[dlfs.Dataset, int], None]) -> None:
        self._over = threading.Event()
        self._uri, self._read = uri, read
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        epoch = 0
        while not self._over.wait(0.02):
            with contextlib.suppress(DlfsError), dlfs.connect(self._uri)["d"] as dataset:
                while not self._over.wait(0.02):
                    self._read(dataset, epoch)
                    epoch += 1


def read_epoch(dataset: dlfs.Dataset, epoch: int) -> None:
    for batch in dataset.batches(50, epoch=epoch, on_error="skip"):
        batch.release()


@dataclass
class Watched:
    """A service, which a training uses and Prometheus watches."""

    start: Callable[[], Service]
    service: Service
    prometheus: Prometheus


@pytest.fixture
def watch(serve: Callable[..., Service], tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Starts a service, a training and Prometheus."""
    with contextlib.ExitStack() as stack:

        def watch(volume: str, read: Callable[[dlfs.Dataset, int], None] = read_epoch) -> Watched:
            port = free_port()

            def start() -> Service:
                options = ("--metrics", f"127.0.0.1:{port}", "--cache", "64KiB")
                return serve(volume, options=options)

            service = start()
            stack.enter_context(contextlib.closing(Training(service.uri, read)))
            prometheus = Prometheus(tmp_path / "prometheus", port)
            stack.enter_context(contextlib.closing(prometheus))
            return Watched(start, service, prometheus)

        yield watch


@pytest.fixture
def volume(tmp_path: Path) -> str:
    return make_volume(tmp_path / "v.img", SAMPLES)


@pytest.fixture
def replicated() -> Iterator[tuple[ScriptedTarget, str]]:
    """Two targets with a copy of the dataset each; the second, and the URI of the volume."""
    with contextlib.ExitStack() as stack:
        targets = [
            stack.enter_context(
                ScriptedTarget([Subsystem(f"nqn.2026-11.org.dlfs:{n}", [Namespace(16 * MIB)])])
            )
            for n in range(2)
        ]
        uris = [target.uri(timeout_ms=2500, reconnect_ms=500) for target in targets]
        dlfs.format_volume(uris, chunk_bytes=64 * KIB, replicas=2)
        with dlfs.open(uris) as volume, volume.writer("d") as writer:
            for path, data in SAMPLES.items():
                writer.add(path, data)
        yield targets[1], ",".join(uris)


@pytest.mark.prometheus
def test_nothing_fires_without_a_cause(watch: Callable[..., Watched], volume: str) -> None:
    prometheus = watch(volume).prometheus
    wait_for(lambda: bool(prometheus.query("dlfs_samples_total > 0")), "a sample")
    prometheus.expect_none()
    for query in dashboard_queries():
        assert prometheus.query(query.replace("$__rate_interval", "5s")), query


@pytest.mark.prometheus
def test_a_service_ends(watch: Callable[..., Watched], volume: str) -> None:
    watched = watch(volume)
    watched.service.stop()
    watched.prometheus.expect("DlfsServiceDown")


@pytest.mark.prometheus
def test_a_service_restarts(watch: Callable[..., Watched], volume: str) -> None:
    watched = watch(volume)
    for _ in range(3):
        watched.service.kill()
        began_s = time.time()
        watched.service = watched.start()
        wait_for(lambda s=began_s: watched.prometheus.started_s() >= s, "the new service")  # type: ignore[misc]
    watched.prometheus.expect("DlfsServiceRestarts", also=("DlfsServiceDown",))


@pytest.mark.prometheus
def test_a_member_is_lost(
    watch: Callable[..., Watched], replicated: tuple[ScriptedTarget, str]
) -> None:
    target, uri = replicated
    watched = watch(uri)
    target.kill()
    watched.prometheus.expect("DlfsMemberLost")


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("action", "alert"),
    [
        (Complete(status=UNRECOVERED_READ, with_data=False), "DlfsMemberErrors"),
        (Delay(0.05), "DlfsMemberSlow"),
    ],
)
def test_a_member_fails_or_is_slow(
    watch: Callable[..., Watched],
    replicated: tuple[ScriptedTarget, str],
    action: Action,
    alert: str,
) -> None:
    target, uri = replicated
    watched = watch(uri)
    chance = 1.0 if isinstance(action, Delay) else 0.1  # of which all reads fail is lost
    target.play(FaultScript([Fault(Event.READ, action, times=None, chance=chance)]))
    watched.prometheus.expect(alert)


@pytest.mark.prometheus
def test_samples_are_damaged(watch: Callable[..., Watched], volume: str) -> None:
    damage(volume, 5)
    watch(volume).prometheus.expect("DlfsChecksumErrors", "DlfsSamplesFailed")


@pytest.mark.prometheus
def test_a_client_holds_all_its_memory(watch: Callable[..., Watched], volume: str) -> None:
    held: list[dlfs.Batch] = []

    def hold(dataset: dlfs.Dataset, _epoch: int) -> None:
        with contextlib.suppress(LimitError):
            held.append(dataset.read(range(len(dataset))))

    watch(volume, hold).prometheus.expect("DlfsClientRefused")
    held.clear()
