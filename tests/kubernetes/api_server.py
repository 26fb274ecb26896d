"""The part of a cluster that mount pods need: pods in an API server, and a kubelet that runs them.

A container is a process of this machine, of the user and without the rights that the pod names; the
paths of its volumes are those of the node. It stands for the API server and kubelet where there is
no cluster: scheduling, admission and container runtimes are not in it.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "token-of-the-driver"


class Pod:
    """A pod and the process of its container, which is started again when it ends."""

    def __init__(self, pod: Any) -> None:
        self.pod = pod
        pod["status"] = {"phase": "Running", "containerStatuses": [{"state": {}, "lastState": {}}]}
        self._ended = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _command(self) -> tuple[list[str], dict[str, str]]:
        spec = self.pod["spec"]
        (container,) = spec["containers"]
        user = spec["securityContext"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        paths = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
        places = {m["mountPath"]: paths.get(m["name"], "/tmp") for m in container["volumeMounts"]}
        environment = {each["name"]: each["value"] for each in container["env"]}
        for path in paths.values():
            assert Path(path).is_dir(), path
        command = ["setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"]
        command += ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--"]
        command += [sys.executable, "-m", "dlfs.cli"]
        command += [places.get(word, word) for word in container["args"]]
        return command, {name: places.get(value, value) for name, value in environment.items()}

    def _run(self) -> None:
        command, environment = self._command()
        (found,) = self.pod["status"]["containerStatuses"]
        while not self._ended.is_set():
            self._process = subprocess.Popen(
                command, env=environment, cwd="/", stderr=subprocess.PIPE, text=True
            )
            if self._ended.is_set():
                self._process.terminate()
            _, text = self._process.communicate()
            code = self._process.returncode
            found["lastState"] = {"terminated": {"exitCode": code, "message": text[-2048:]}}

    def kill(self) -> None:
        """Have the container die, as for want of memory."""
        assert self._process is not None
        self._process.kill()

    def end(self) -> None:
        self._ended.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join()


class ApiServer:
    """An API server with the pods of one namespace.

    Args:
        account: folder, which gets the files of a service account.
        certificate: certificate and key of the server, in a file; None: it speaks HTTP.
    """

    def __init__(self, account: Path, certificate: Path | None = None) -> None:
        self.pods: dict[str, Pod] = {}
        self.created: list[Any] = []
        account.mkdir()
        (account / "token").write_text(TOKEN)
        (account / "namespace").write_text("dlfs-mounts")
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_words: object) -> None:
                pass

            def _answer(self, status: int, found: Any) -> None:
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def _serve(self) -> None:
                assert self.headers["Authorization"] == f"Bearer {TOKEN}"
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                self._answer(*api.answer(self.command, self.path, body))

            do_GET = do_POST = do_DELETE = _serve  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            (account / "ca.crt").write_bytes(certificate.read_bytes())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def make_pod(self, body: Any) -> Pod:
        """Start the container of a pod."""
        return Pod(body)

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        """Return status and answer of a request."""
        parts = urlsplit(target)
        folder, _, name = parts.path.partition("/pods")
        assert folder == "/api/v1/namespaces/dlfs-mounts"
        name = name.strip("/")
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.pods:
                return 409, {"message": "exists"}
            self.created.append(json.loads(json.dumps(body)))
            self.pods[name] = self.make_pod(body)
            return 201, body
        if not name:
            node = parse_qs(parts.query)["fieldSelector"][0].removeprefix("spec.nodeName=")
            found = [each.pod for each in self.pods.values()]
            return 200, {"items": [pod for pod in found if pod["spec"]["nodeName"] == node]}
        if name not in self.pods:
            return 404, {"message": "not found"}
        if method == "DELETE":
            pod = self.pods[name]
            pod.end()
            del self.pods[name]
            return 200, pod.pod
        return 200, self.pods[name].pod

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for pod in list(self.pods.values()):
            with contextlib.suppress(ProcessLookupError):
                pod.end()
