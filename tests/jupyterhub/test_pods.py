"""Pods as kubespawner makes them for users of a hub: volumes by rights, and their manifests."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.jupyterhub.dlfs_volumes import KubernetesVolumes, read_table
from tests.jupyterhub.hub import ROOT

pytestmark = pytest.mark.jupyterhub

KUBERNETES = ("1.35", "1.36", "1.37")
VOLUMES = read_table(
    {
        "photos": {"uri": "nvme-tcp+discover://10.0.0.11", "groups": ["vision"], "memory": "4GiB"},
        "genomes": {
            "uri": "nvme-tcp://10.0.0.11/nqn.2024-01.org.example:genomes?nsid=1&dhchap_key=hub",
            "users": ["ann@example.org"],
            "secret": "dlfs-{username}",
            "attributes": {"podMemory": "6Gi", "dataset": "g{0}"},
        },
    }
)
CLUSTER = """\
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: none, user: {}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The configuration of a hub, in which kubespawner finds a cluster that is never asked."""
    from traitlets.config import Config

    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").write_text(CLUSTER)
    monkeypatch.setenv("HOME", str(tmp_path))
    c = Config()
    c.KubeSpawner.volumes = [{"name": "home", "persistentVolumeClaim": {"claimName": "home"}}]
    c.KubeSpawner.volume_mounts = [{"name": "home", "mountPath": "/home/jovyan"}]
    return c


def pod_of(config: Any, name: str, groups: list[str], profile: str | None = None) -> Any:
    """Return the manifest of the pod of a user's server, as a dict."""
    from jupyterhub import orm
    from jupyterhub.objects import Hub
    from jupyterhub.user import User
    from kubernetes_asyncio.client import ApiClient
    from kubespawner import KubeSpawner

    async def make() -> Any:
        session = orm.new_session_factory("sqlite:///:memory:")()
        found = orm.User(name=name)
        session.add(found)
        for group in groups:
            session.add(orm.Group(name=group, users=[found]))
        session.commit()
        settings = {"hub": Hub(ip="hub", port=8081), "spawner_class": KubeSpawner}
        spawner = User(found, {**settings, "config": config, "base_url": "/"}).spawners[""]
        spawner.user_options = {"profile": profile} if profile else {}
        spawner.api_token = "none"
        if spawner.pre_spawn_hook:
            await spawner.run_pre_spawn_hook()
        await spawner.load_user_options()
        manifest = await spawner.get_pod_manifest()
        async with ApiClient() as client:
            return client.sanitize_for_serialization(manifest)

    return asyncio.run(make())


def volumes_in(pod: Any) -> dict[str, Any]:
    return {each["name"]: each for each in pod["spec"]["volumes"]}


def check(pod: Any) -> None:
    """Check a manifest against the schemas of the newest versions."""
    import kubernetes_validate

    pod = {"apiVersion": "v1", "kind": "Pod", **pod}
    for version in KUBERNETES:
        kubernetes_validate.validate(pod, version, strict=True)
    mounted = {each["name"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == set(volumes_in(pod))


def test_a_pod_has_all_volumes_of_its_user(config: Any) -> None:
    KubernetesVolumes(VOLUMES).configure(config)
    pod = pod_of(config, "ann@example.org", ["vision"])
    check(pod)
    volumes = volumes_in(pod)
    assert sorted(volumes) == ["dlfs-genomes", "dlfs-photos", "home"]
    genomes = volumes["dlfs-genomes"]["csi"]
    assert genomes["volumeAttributes"]["dataset"] == "g{0}"
    assert genomes["volumeAttributes"]["volumes"].endswith("genomes?nsid=1&dhchap_key=hub")
    assert genomes["nodePublishSecretRef"]["name"].startswith("dlfs-ann-example-org---")
    environment = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert environment["DLFS_VOLUMES"] == "/volumes"

    pod = pod_of(config, "bob", ["sound", "vision"])
    check(pod)
    assert sorted(volumes_in(pod)) == ["dlfs-photos", "home"]


@pytest.mark.parametrize("kind", [list, dict])
def test_profiles_are_those_whose_volumes_the_user_may_read(config: Any, kind: type) -> None:
    if kind is dict:
        home = config.KubeSpawner.volumes[0]
        config.KubeSpawner.volumes = {"00-home": home}
        config.KubeSpawner.volume_mounts = {"00-home": config.KubeSpawner.volume_mounts[0]}
    gpu = {"extra_resource_limits": {"nvidia.com/gpu": "1"}}
    KubernetesVolumes(VOLUMES).configure(
        config,
        [
            {"display_name": "Small"},
            {
                "display_name": "Genomes",
                "dlfs_volumes": ["genomes"],
                "kubespawner_override": gpu,
            },
        ],
    )
    pod = pod_of(config, "ann@example.org", ["vision"])
    check(pod)
    assert sorted(volumes_in(pod)) == ["dlfs-genomes", "dlfs-photos", "home"]
    pod = pod_of(config, "ann@example.org", ["vision"], "genomes")
    check(pod)
    assert sorted(volumes_in(pod)) == ["dlfs-genomes", "home"]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert sorted(volumes_in(pod_of(config, "bob", ["vision"], "small"))) == ["dlfs-photos", "home"]
    with pytest.raises(ValueError, match="genomes"):
        pod_of(config, "bob", ["vision"], "genomes")


def test_the_driver_takes_the_attributes() -> None:
    sys.path.insert(0, str(ROOT / "deploy/kubernetes/csi"))
    try:
        context = importlib.import_module("dlfs_csi.context")
        name = importlib.import_module("dlfs_csi").DRIVER_NAME
    finally:
        sys.path.pop(0)
    settings = KubernetesVolumes(VOLUMES).pod_settings(VOLUMES)
    for volume in settings["volumes"].values():
        assert volume["csi"]["driver"] == name
        context.parse_attributes(volume["csi"]["volumeAttributes"])
