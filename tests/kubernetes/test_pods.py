"""Servers as pods: what the driver asks of a cluster, and a mount whose server comes and goes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlfs.base.units import MIB
from dlfs.fabric.keys import generate_key
from dlfs_csi.cluster import Cluster
from dlfs_csi.context import parse_attributes
from dlfs_csi.failures import CallError, Code
from dlfs_csi.launching import Launch
from dlfs_csi.pods import PodLauncher, PodOptions, failure_of, make_pod
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.conftest import SAMPLES
from tests.kubernetes.driving import Plant, Refused
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.authentication import Authentication
from tests.support.nvme.scripted import DEFAULT_NQN
from tests.support.volumes import new_volume, write_dataset
from tests.support.waiting import wait_for

URI = f"nvme-tcp://10.0.0.1:4420/{DEFAULT_NQN}?nsid=1&dhchap_key=host"
OPTIONS = PodOptions(
    node="node-1", image="registry.example/dlfs:0.1.0", uid=10001, gid=10001,
    identity=Path("/run/dlfs/csi/identity"), priority_class="system-node-critical",
)  # fmt: skip


def launch(keys: Path | None = None, **attributes: str) -> Launch:
    spec = parse_attributes({"volumes": URI, **attributes})
    return Launch("0" * 32, "/run/dlfs/holder/mounts/0", keys, spec)


def test_a_pod_has_no_rights_and_sees_its_own_mount_only() -> None:
    pod = make_pod(launch(Path("/run/dlfs/csi/keys/0"), memory="4GiB", podCpu="2"), OPTIONS)
    paths = {v["hostPath"]["path"] for v in pod["spec"]["volumes"] if "hostPath" in v}
    assert paths == {
        "/run/dlfs/holder/mounts/0", "/run/dlfs/csi/keys/0", "/run/dlfs/csi/identity"
    }  # fmt: skip
    (container,) = pod["spec"]["containers"]
    assert container["resources"] == {
        "limits": {"memory": "4608Mi", "cpu": "2"},
        "requests": {"memory": "4608Mi", "cpu": "100m"},
    }
    assert container["args"][:3] == ["mount", "--holder", "/run/dlfs/mount"]
    assert container["args"][-2:] == ["--", URI]
    assert not pod["spec"]["automountServiceAccountToken"]


def test_arguments_have_no_variables_of_kubernetes() -> None:
    spec = parse_attributes({"volumes": "nvme-tcp://h/nqn.2014-08.org:$(HOME)$$?nsid=1"})
    (container,) = make_pod(Launch("0" * 32, "/h", None, spec), OPTIONS)["spec"]["containers"]
    assert container["args"][-1] == "nvme-tcp://h/nqn.2014-08.org:$$(HOME)$$$$?nsid=1"


def test_pods_are_valid_for_the_newest_versions() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    major, minor, _ = map(int, validate.latest_version().split("."))
    for version in (f"{major}.{minor - age}" for age in range(3)):
        for keys in (None, Path("/run/dlfs/csi/keys/0")):
            validate.validate(make_pod(launch(keys), OPTIONS), version, strict=True)


@pytest.mark.parametrize(
    ("status", "code", "part"),
    [
        ({"phase": "Failed", "reason": "OutOfmemory", "message": "m"}, 8, "OutOfmemory"),
        ({"phase": "Failed", "reason": "Evicted", "message": "m"}, 14, "Evicted"),
        ({"state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}, 14, "ErrImagePull"),
        ({"state": {"terminated": {"exitCode": 3, "message": "dlfs: a\ndlfs: b"}}}, 5, ": dlfs: b"),
        ({"lastState": {"terminated": {"exitCode": 8, "message": "m"}}}, 16, "status 8"),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, None, ""),
        ({"state": {"running": {}}}, None, ""),
    ],
)
def test_the_status_of_a_pod_says_why_it_does_not_serve(
    status: dict[str, object], code: int | None, part: str
) -> None:
    if "phase" not in status:
        status = {"phase": "Pending", "containerStatuses": [status]}
    found = failure_of(status)
    assert (found and int(found.code)) == code
    assert part in str(found or "")


def test_disks_of_the_node_are_refused(tmp_path: Path) -> None:
    api = ApiServer(tmp_path / "account")
    try:
        launcher = PodLauncher(Cluster(url=api.url, account=tmp_path / "account"), OPTIONS)
        launcher.check(parse_attributes({"volumes": URI}))
        with pytest.raises(CallError, match=r"expected nvme-tcp: .*'/dev/sda'") as refused:
            launcher.check(parse_attributes({"volumes": f"{URI},/dev/sda"}))
        assert refused.value.code is Code.INVALID_ARGUMENT
    finally:
        api.close()


def test_a_cluster_that_cannot_be_reached_is_unavailable(tmp_path: Path) -> None:
    api = ApiServer(tmp_path / "account")
    api.close()
    cluster = Cluster(url=api.url, account=tmp_path / "account")
    with pytest.raises(CallError, match="refused") as failed:
        cluster.pod("p")
    assert failed.value.code is Code.UNAVAILABLE
    with pytest.raises(CallError, match="KUBERNETES_SERVICE_HOST"):
        Cluster()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    """An API server that speaks TLS, with a certificate for its address."""
    certificate = tmp_path / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(certificate), "-out", f"{certificate}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    with certificate.open("ab") as file:
        file.write(Path(f"{certificate}.crt").read_bytes())
    api = ApiServer(tmp_path / "account", certificate)
    yield api
    api.close()


@pytest.mark.root
@pytest.mark.fuse
def test_a_pod_serves_a_mount_and_is_made_again(
    cluster: ApiServer, tmp_path: Path, user: str
) -> None:
    if user == "0:0":
        pytest.skip("only root can run this Python")
    namespace = Namespace(16 * MIB)
    account = str(tmp_path / "account")
    options = ["--image", "dlfs:1", "--api", cluster.url, "--account", account]
    plant = Plant(user, "--servers", "pods", *options)
    target = plant.targets / "target"
    terms = Authentication(generate_key())
    words = {"attributes": {"dataset": "animals"}, "secrets": {"host": terms.host_key}}
    try:
        with ScriptedTarget([Subsystem(DEFAULT_NQN, [namespace])]) as storage:
            with pytest.raises(Refused, match=r"DATA_LOSS: the server ended \(status 4\)"):
                plant.publish(target, storage.uri())
            new_volume(storage.uri())
            write_dataset(storage.uri(), "animals", SAMPLES)
        subsystem = Subsystem(DEFAULT_NQN, [namespace], authentication=terms)
        with ScriptedTarget([subsystem]) as storage:
            uri = storage.uri(dhchap_key="host")
            with pytest.raises(Refused, match=r"UNAUTHENTICATED: the server ended \(status 8\)"):
                plant.publish(target, uri)
            plant.publish(target, uri, **words)
            assert (target / "cat/0.txt").read_text() == "first"
            (pod,) = cluster.pods.values()
            pod.kill()
            assert (target / "dog/1.txt").read_text() == "second"
            cluster.answer("DELETE", f"/api/v1/namespaces/dlfs-mounts/pods/{_name(pod.pod)}", None)
            wait_for(lambda: cluster.pods, "another pod")
            assert sorted(path.name for path in target.iterdir()) == ["cat", "dog"]
            plant.unpublish(target)
        assert (cluster.pods, plant.left()) == ({}, [])
        assert terms.host_key.split(":")[2] not in json.dumps(cluster.created)
    finally:
        plant.close()


def _name(pod: dict[str, dict[str, str]]) -> str:
    return pod["metadata"]["name"]
