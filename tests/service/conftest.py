"""Node services for tests: ``serve`` starts one and waits until it is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.serving import Service, make_samples, make_volume


@pytest.fixture(scope="session")
def samples() -> dict[bytes, bytes]:
    """Return the samples of the dataset ``d``, in path order."""
    return make_samples()


@pytest.fixture
def volume(tmp_path: Path, samples: dict[bytes, bytes]) -> str:
    """Make a volume ``images`` with the dataset ``d``, and return its URI."""
    return make_volume(tmp_path / "images.img", samples, label="images")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a service of some volumes, ready when this returns; ended with the test."""
    services: list[Service] = []

    def start(
        *volumes: str, options: tuple[str, ...] = (), program: tuple[str, ...] = ()
    ) -> Service:
        socket = tmp_path / "s.sock"
        services.append(Service(list(volumes), socket, *options, program=program))
        return services[-1].wait_ready()

    yield start
    for service in services:
        service.close()
