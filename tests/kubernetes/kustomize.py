"""Renders the kustomizations of ``deploy/kubernetes/manifests`` without kustomize.

It has what they use: ``resources``, ``namespace``, ``images``, ``patches`` (JSON 6902). Any other
field is an error. Where kubectl has kustomize 5, a test compares the two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
FIELDS = {"apiVersion", "kind", "resources", "namespace", "images", "patches"}
CLUSTER_KINDS = {
    *("ClusterRole", "ClusterRoleBinding", "CSIDriver", "CustomResourceDefinition", "Namespace"),
    *("PersistentVolume", "PriorityClass", "StorageClass"),
}
"""Kinds of objects that are in no namespace."""


def render(folder: Path) -> list[Object]:
    """Return the objects that the kustomization of a directory makes.

    Raises:
        AssertionError: it has a field that is not known here.
    """
    (rules,) = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    assert set(rules) <= FIELDS, f"{folder}: expected {sorted(FIELDS)}, got {sorted(rules)}"
    objects = [each for name in rules["resources"] for each in _resource(folder / name)]
    for patch in rules.get("patches", ()):
        _apply(patch, objects)
    for each in objects:
        if "namespace" in rules:
            _place(each, rules["namespace"])
        for image in rules.get("images", ()):
            for container in containers(each):
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def load(path: Path) -> list[Object]:
    """Return the objects of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def _resource(path: Path) -> list[Object]:
    return render(path) if path.is_dir() else load(path)


def _place(each: Object, namespace: str) -> None:
    """Put an object into a namespace, and the service accounts that a binding names."""
    if each["kind"] not in CLUSTER_KINDS:
        each["metadata"]["namespace"] = namespace
    for subject in each.get("subjects", ()):
        if subject["kind"] == "ServiceAccount":
            subject["namespace"] = namespace


def _apply(patch: Object, objects: list[Object]) -> None:
    target = patch["target"]
    found = [
        each
        for each in objects
        if each["kind"] == target["kind"]
        and each["metadata"]["name"] == target.get("name", each["metadata"]["name"])
    ]
    assert found, f"no object for the patch of {target}"
    for each in found:
        for step in yaml.safe_load(patch["patch"]):
            _change(each, step)


def _change(each: Any, step: Object) -> None:
    *parents, last = (
        word.replace("~1", "/").replace("~0", "~") for word in step["path"].split("/")[1:]
    )
    for name in parents:
        each = each[int(name)] if isinstance(each, list) else each[name]
    value = copy.deepcopy(step.get("value"))
    if isinstance(each, list) and step["op"] == "add":
        each.insert(len(each) if last == "-" else int(last), value)
    elif step["op"] in ("add", "replace"):
        each[int(last) if isinstance(each, list) else last] = value
    else:
        assert step["op"] == "remove", step
        del each[int(last) if isinstance(each, list) else last]


def pod_specs(each: Any) -> Iterator[Object]:
    """Yield the specifications of all pods that an object makes, of whatever kind it is."""
    if isinstance(each, dict):
        if isinstance(each.get("containers"), list):
            yield each
        else:
            for value in each.values():
                yield from pod_specs(value)
    elif isinstance(each, list):
        for value in each:
            yield from pod_specs(value)


def containers(each: Any) -> Iterator[Object]:
    """Yield all containers of an object's pods, also those that run before the others."""
    for spec in pod_specs(each):
        yield from spec.get("initContainers", ())
        yield from spec["containers"]
