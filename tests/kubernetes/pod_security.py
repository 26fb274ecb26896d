"""Checks pods by the Pod Security Standard "restricted", of Kubernetes 1.37 for Linux.

Source: kubernetes.io/docs/concepts/security/pod-security-standards, every control of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
SECCOMP = {"RuntimeDefault", "Localhost"}
CAPABILITIES = {"NET_BIND_SERVICE"}
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
    *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time"),
    *("net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(spec: dict[str, Any]) -> list[str]:
    """Return what a pod's specification has that "restricted" does not allow."""
    found = list(_of_pod(spec))
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            found += [f"{container['name']}: {text}" for text in _of_container(container, spec)]
    return found


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']}: {', '.join(kinds - VOLUMES)}"
    context = spec.get("securityContext", {})
    for each in context.get("sysctls", ()):
        if each["name"] not in SYSCTLS:
            yield f"sysctl {each['name']}"
    yield from _of_context(context)


def _of_context(context: dict[str, Any]) -> Iterator[str]:
    """Yield what neither a pod nor a container may say."""
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot false"
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "seccompProfile"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "appArmorProfile"
    options = context.get("seLinuxOptions", {})
    if options.get("type", "") not in SELINUX_TYPES or options.get("user") or options.get("role"):
        yield "seLinuxOptions"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"


def _of_container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    context, pod = container.get("securityContext", {}), spec.get("securityContext", {})
    yield from _of_context(context)
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities: ALL is not dropped"
    if added := set(capabilities.get("add", ())) - CAPABILITIES:
        yield f"capabilities: {', '.join(sorted(added))} added"
    if not context.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot is not true"
    if not (context.get("seccompProfile") or pod.get("seccompProfile")):
        yield "no seccompProfile"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle"):
        if _names_a_host(container.get(probe, {})):
            yield f"{probe}: host"


def _names_a_host(each: Any) -> bool:
    if isinstance(each, dict):
        return bool(each.get("host")) or any(_names_a_host(value) for value in each.values())
    return False
