"""Two users of a hub in a browser: the notebook of examples/, and a volume of each of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jupyterhub.hub import CHROMIUM, PASSWORD, ROOT, Hub, accounts
from tests.jupyterhub.test_local import DLFS, volume_of

pytestmark = [pytest.mark.jupyterhub, pytest.mark.root]

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SECONDS = 60
READS = """\
import os
from pathlib import Path

volumes = Path(os.environ["DLFS_VOLUMES"])
print("volumes:", sorted(path.name for path in volumes.iterdir()))
for path in sorted(volumes.glob("*/*/*")):
    print(path.read_text())
try:
    print(os.listdir(volumes.parent / OTHER / "photos"))
except OSError as error:
    print("refused:", error.strerror)

import dlfs

try:
    volume = dlfs.connect(os.environ["DLFS_SERVICE"], volume="photos")
except dlfs.DeviceError as error:
    volume = None
    print(error)
volume
"""


@pytest.fixture
def world() -> Iterator[tuple[Hub, str, str]]:
    with Hub() as hub, accounts("ann", "bob", home=hub.home) as (ann, bob):
        photos = volume_of(hub.folder, "photos")
        service = f"unix:{hub.folder}/service.sock"
        hub.configure(
            f"""
class Spawner(VolumeProgress, LocalProcessSpawner):
    pass

c.JupyterHub.spawner_class = Spawner
c.Spawner.environment.pop("JUPYTERHUB_SINGLEUSER_APP")
c.Spawner.environment["DLFS_SERVICE"] = {service!r}
LocalVolumes(read_table({{
    "photos": {{"uri": {photos!r}, "groups": ["vision"]}},
    "sounds": {{"uri": {volume_of(hub.folder, "sounds")!r}, "users": [{bob!r}]}},
}}), directory={str(hub.mounts)!r}, dlfs={str(DLFS)!r}).configure(c)
c.JupyterHub.load_groups = {{"vision": {{"users": [{ann!r}]}}}}
c.Authenticator.allowed_users = {{{ann!r}, {bob!r}}}
"""
        )
        hub.start()
        words = ["--socket", service.removeprefix("unix:"), "--allow", f"photos=user:{ann}"]
        words += ["--allow-user", bob, "--background", "--log", str(hub.folder / "service.log")]
        subprocess.run([DLFS, "serve", photos, *words], check=True)
        yield hub, ann, bob
        subprocess.run([DLFS, "stop", service], check=True)


def put_notebook(hub: Hub, user: str, name: str, text: str) -> Path:
    path = hub.home / user / name
    path.write_text(text)
    shutil.chown(path, user, user)
    return path


def notebook_of(code: str) -> str:
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "source": code}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {
            "cells": [{**cell, "execution_count": None}],
            "metadata": {"kernelspec": kernel},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


def log_in(page, hub: Hub, user: str) -> None:
    """Log in by PAM, and wait for the page of the user's server."""
    page.goto(f"{hub.url}/hub/login")
    page.fill("#username_input", user)
    page.fill("#password_input", PASSWORD)
    page.click("#login_submit")
    page.wait_for_url(re.compile(rf"/user/{user}/lab"))


def run_notebook(page, hub: Hub, user: str, path: Path) -> None:
    """Open a notebook in JupyterLab and run all its cells."""
    page.goto(f"{hub.url}/user/{user}/lab/tree{path}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle")
    page.click('#jp-MainMenu >> text="Run"')
    page.click('text="Run All Cells"')


def test_two_users(world: tuple[Hub, str, str]) -> None:
    from playwright.sync_api import sync_playwright

    hub, ann, bob = world
    pictures = Path(os.environ.get("DLFS_PICTURES", hub.folder))
    tour = put_notebook(hub, ann, "tour.ipynb", (ROOT / "examples/tour.ipynb").read_text())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        pages = {}
        for user in (ann, bob):
            pages[user] = browser.new_context(viewport={"width": 1200, "height": 2200}).new_page()
            pages[user].set_default_timeout(SECONDS * 1000)
            log_in(pages[user], hub, user)

        page = pages[ann]
        run_notebook(page, hub, ann, tour)
        page.wait_for_selector(r".jp-OutputArea-output >> text=/\d+ for training/")
        page.locator(".jp-OutputArea .dlfs").last.scroll_into_view_if_needed()
        assert page.locator(".jp-OutputArea .dlfs").count() == 5
        widths = page.eval_on_selector_all(".dlfs img", "found => found.map(i => i.naturalWidth)")
        assert widths
        assert all(widths)
        page.screenshot(path=pictures / "tour.png")

        for user, other, own in ((ann, bob, "photos"), (bob, ann, "sounds")):
            page = pages[user]
            code = READS.replace("OTHER", repr(other))
            path = put_notebook(hub, user, "reads.ipynb", notebook_of(code))
            run_notebook(page, hub, user, path)
            page.wait_for_selector(".jp-OutputArea-output >> text=refused: Permission denied")
            shown = ".dlfs >> text=texts" if user == ann else "text=read volume 'photos': user "
            page.wait_for_selector(f".jp-OutputArea-output >> {shown}")
            page.screenshot(path=pictures / f"{own}.png")
            said = page.inner_text(".jp-OutputArea-output")
            assert f"volumes: ['{own}']\nof {own}\n" in said
        browser.close()
