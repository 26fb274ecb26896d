"""The manifests: what they render to, the API's schemas, Pod Security, and rules of our own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlfs_csi.context import MountSpec
from dlfs_csi.launching import Launch
from dlfs_csi.pods import LABELS, PodOptions, make_pod
from tests.kubernetes.kustomize import containers, load, pod_specs, render
from tests.kubernetes.pod_security import violations
from tests.support.documents import ROOT

MANIFESTS = ROOT / "deploy/kubernetes/manifests"
KUSTOMIZATIONS = sorted(
    path.parent.relative_to(MANIFESTS).as_posix() for path in MANIFESTS.rglob("kustomization.yaml")
)
OVERLAYS = [name for name in KUSTOMIZATIONS if name.startswith("overlays/")]
EXAMPLES = sorted(path.name for path in (MANIFESTS / "examples").glob("*.yaml"))
VERSIONS = ("1.35", "1.36", "1.37")
"""The three newest versions of Kubernetes whose schemas kubernetes-validate has."""
FOREIGN = re.compile(r"(kubeflow\.org|jobset\.x-k8s\.io|ray\.io|monitoring\.coreos\.com)/")
"""API groups of other projects, whose schemas are not in Kubernetes."""
KUSTOMIZE_MIN = (5, 0)


def objects_of(name: str) -> list[dict[str, Any]]:
    folder = MANIFESTS / name
    return render(folder) if folder.is_dir() else load(MANIFESTS / "examples" / name)


ALL = [*KUSTOMIZATIONS, *EXAMPLES]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_the_three_newest_versions(version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("no kubernetes-validate: make test-containers installs it")
    import kubernetes_validate

    for name in [*OVERLAYS, *EXAMPLES]:
        for each in objects_of(name):
            checked = [each]
            if FOREIGN.match(each["apiVersion"]):  # of which only the pods can be checked
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
                checked = [pod | {"spec": spec} for spec in pod_specs(each)]
            for document in checked:
                kubernetes_validate.validate(document, version, strict=True)


def _kustomize_version() -> tuple[int, ...]:
    """Return the version of the kustomize that is in kubectl; (0,) if there is none."""
    if shutil.which("kubectl") is None:
        return (0,)
    told = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True)
    found = re.search(r"Kustomize Version: v(\d+)\.(\d+)", told.stdout)
    return tuple(map(int, found.groups())) if found else (0,)


@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_makes_the_same(name: str) -> None:
    if _kustomize_version() < KUSTOMIZE_MIN:
        pytest.skip("no kubectl with kustomize 5")
    command = ["kubectl", "kustomize", MANIFESTS / name]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert _by_name(yaml.safe_load_all(made)) == _by_name(objects_of(name))


def _by_name(objects: Any) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_an_overlay_names_is_in_it(name: str) -> None:
    """Accounts and roles, and the pods that a policy or a monitor selects."""
    objects = objects_of(name)
    found = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert len(found) == len(objects)
    labels = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in objects
        if "template" in each.get("spec", {})
    ]
    for each in objects:
        for spec in pod_specs(each):
            assert ("ServiceAccount", spec["serviceAccountName"]) in found
        if each["kind"].endswith("Binding"):
            assert (each["roleRef"]["kind"], each["roleRef"]["name"]) in found
            assert all((sub["kind"], sub["name"]) in found for sub in each["subjects"])
        if each["kind"] in ("NetworkPolicy", "PodMonitor"):
            selector = each["spec"].get("podSelector") or each["spec"]["selector"]
            wanted = selector["matchLabels"].items()
            assert any(wanted <= those.items() for those in [*labels, LABELS]), each["metadata"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_mount_pods_have_the_image_of_the_holder(name: str) -> None:
    images = {found["name"]: found for each in objects_of(name) for found in containers(each)}
    if "driver" in images:
        assert f"--image={images['holder']['image']}" in images["driver"]["args"]


def test_a_mount_pod_is_restricted_but_for_its_folders() -> None:
    """It has no kind of volume in addition to those, so it needs a namespace of its driver's."""
    options = PodOptions(node="a", image="dlfs", uid=1, gid=1, identity=Path("/run/dlfs/identity"))
    spec = MountSpec(volumes=("nvme-tcp://a/b",))
    pod = make_pod(Launch(name="m", folder="/f", keys=Path("/k"), spec=spec), options)
    names = ("holder", "identity", "keys")
    assert violations(pod["spec"]) == [f"volume {name}: hostPath" for name in names]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_container_is_limited_and_probed(name: str) -> None:
    for each in objects_of(name):
        for spec in pod_specs(each):
            assert spec["automountServiceAccountToken"] is not None
            assert "priorityClassName" in spec
            assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec)
        for container in containers(each):
            assert "memory" in container["resources"]["limits"], container["name"]
            assert container["securityContext"]["readOnlyRootFilesystem"], container["name"]
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")


def test_who_is_privileged() -> None:
    """The node driver mounts; no other container has a right beyond changing owners of files."""
    privileged, added = set(), set()
    for name in OVERLAYS:
        for container in (found for each in objects_of(name) for found in containers(each)):
            context = container["securityContext"]
            if context.get("privileged"):
                privileged.add(container["name"])
            else:
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"]["drop"] == ["ALL"]
                added |= set(context["capabilities"].get("add", ()))
    assert privileged == {"driver"}
    assert added <= {"CHOWN", "DAC_OVERRIDE", "FOWNER"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_restricted(name: str) -> None:
    for each in objects_of(name):
        for spec in pod_specs(each):
            assert violations(spec) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"hostIPC": True}, "hostIPC"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "volume a: hostPath"),
        ({"securityContext": {}}, "c: runAsNonRoot is not true"),
        ({"containers": [{"name": "c"}]}, "c: capabilities: ALL is not dropped"),
    ],
)
def test_the_rules_of_pod_security_find(change: dict[str, Any], found: str) -> None:
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "c", "securityContext": context}],
    }
    assert violations(spec) == []
    assert found in violations(spec | change)


@pytest.mark.parametrize(("name", "number"), [("inline-volume", 0), ("service-volume", -1)])
def test_the_page_shows_the_volumes_of_examples(name: str, number: int) -> None:
    """docs/kubernetes.md has the lines of the examples, and they are ten."""
    (pod,) = load(MANIFESTS / f"examples/{name}.yaml")
    page = Path(ROOT / "docs/kubernetes.md").read_text()
    shown = re.findall(r"^```yaml\n(volumes:\n.*?)^```$", page, re.MULTILINE | re.DOTALL)[number]
    assert yaml.safe_load(shown)["volumes"] == pod["spec"]["volumes"]
    assert len(shown.splitlines()) <= 10


def test_driver_and_service_have_the_same_directory_of_sockets() -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects_of("overlays/service")
        if each["kind"] == "DaemonSet"
    }
    found = []
    for pod, name, option in (
        ("dlfs-node", "driver", "--service"),
        ("dlfs-service", "service", "--socket"),
    ):
        (container,) = (each for each in pods[pod]["containers"] if each["name"] == name)
        (text,) = (each for each in container["args"] if each.startswith(f"{option}="))
        path = Path(text.partition("=")[2])
        mounts = {Path(each["mountPath"]): each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pods[pod]["volumes"]}
        found.append((volumes[mounts[path.parent]]["hostPath"]["path"], path.name))
        if option == "--socket":
            assert f"--sockets={path.parent}/sockets" in container["args"]
    assert found == [("/var/lib/dlfs/service", "control.sock")] * 2
