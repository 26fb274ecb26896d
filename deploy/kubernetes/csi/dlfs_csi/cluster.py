"""The few calls of the Kubernetes API that the driver makes, on the pods of one namespace.

The token of the service account is read for each call, since it changes. A privileged container
gets no more code than these calls need: no client library.

Source: Kubernetes API conventions; "Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from dlfs_csi.failures import CallError, Code

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
"""Longest wait for the API server, in seconds."""
_ANSWER_BYTES_MAX = 64 << 20
_CODES = {401: Code.INTERNAL, 403: Code.INTERNAL, 422: Code.INVALID_ARGUMENT}
_GONE, _THERE = 404, 409


class Cluster:
    """The API server.

    Args:
        namespace: namespace of the pods; empty: that of this pod.
        url: address of the API server; empty: as a pod finds it.
        account: folder of the service account's token and certificate.

    Raises:
        CallError: FAILED_PRECONDITION: this is no pod with a service account.

    Threads: any; each call has a connection of its own.
    """

    def __init__(self, namespace: str = "", url: str = "", account: Path = ACCOUNT) -> None:
        if not url:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
            if not host:
                raise CallError(
                    Code.FAILED_PRECONDITION,
                    "reach the cluster: expected KUBERNETES_SERVICE_HOST, as in a pod, got none",
                )
            host = f"[{host}]" if ":" in host else host
            url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        self._where = urlsplit(url)
        self._account = account
        try:
            self._namespace = namespace or (account / "namespace").read_text().strip()
            self._context = None
            if self._where.scheme == "https":
                self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise CallError(
                Code.FAILED_PRECONDITION, f"reach the cluster: service account: {error}"
            ) from error

    def _call(self, method: str, path: str, body: Any = None, **query: str) -> tuple[int, Any]:
        """Make a call, and return its status and answer.

        Raises:
            CallError: UNAVAILABLE: no answer; otherwise: the API server refuses.
        """
        action = f"{method} pods of the cluster"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        host, port = self._where.hostname or "", self._where.port
        try:
            headers["Authorization"] = f"Bearer {(self._account / 'token').read_text().strip()}"
            link: http.client.HTTPConnection
            if self._context is None:
                link = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
            else:
                link = http.client.HTTPSConnection(
                    host, port, timeout=TIMEOUT_S, context=self._context
                )
            try:
                target = f"/api/v1/namespaces/{quote(self._namespace)}/pods{path}"
                target += f"?{urlencode(query)}" if query else ""
                link.request(method, target, None if body is None else json.dumps(body), headers)
                answer = link.getresponse()
                status, text = answer.status, answer.read(_ANSWER_BYTES_MAX)
            finally:
                link.close()
            found = json.loads(text) if text else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CallError(Code.UNAVAILABLE, f"{action}: {error}") from error
        if status >= 300 and status not in (_GONE, _THERE):
            reason = found.get("message", "") if isinstance(found, dict) else ""
            code = _CODES.get(status, Code.UNAVAILABLE)
            raise CallError(code, f"{action}: status {status}: {reason}")
        return status, found

    def pods(self, labels: str, node: str) -> list[Any]:
        """Return the pods with labels on a node."""
        query = {"labelSelector": labels, "fieldSelector": f"spec.nodeName={node}"}
        status, found = self._call("GET", "", **query)
        if status == _GONE:
            raise CallError(Code.FAILED_PRECONDITION, f"there is no namespace {self._namespace}")
        return list(found["items"])

    def pod(self, name: str) -> Any | None:
        """Return a pod; None if there is none."""
        status, found = self._call("GET", f"/{quote(name)}")
        return None if status == _GONE else found

    def create(self, pod: Any) -> bool:
        """Create a pod. Returns False if there is one of its name."""
        status, _ = self._call("POST", "", pod)
        if status == _GONE:
            raise CallError(Code.FAILED_PRECONDITION, f"there is no namespace {self._namespace}")
        return status != _THERE

    def delete(self, name: str, grace_s: int) -> bool:
        """Have a pod deleted. Returns False if there is none."""
        status, _ = self._call("DELETE", f"/{quote(name)}", gracePeriodSeconds=str(grace_s))
        return status != _GONE
