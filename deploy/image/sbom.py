"""Writes the list of all parts of the image, an SBOM: ``sbom.py VENV DEBIAN-PACKAGES SBOM.json``.

It is CycloneDX 1.6: the Python packages as ``cyclonedx-py`` finds them, Debian's packages, and the
libraries that DLFS has linked statically. Run by a Python that has ``cyclonedx-bom``, when the
image is built.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

SCHEMA = SchemaVersion.V1_6


def main(environment: Path, packages: Path, target: Path) -> None:
    """Write the list.

    Args:
        environment: the virtual environment with DLFS.
        packages: Debian's packages, a line each: name, version and architecture, with tabs between.
        target: the file to write.

    Raises:
        SystemExit: the list does not follow the schema.
    """
    listed = subprocess.run(
        [
            *(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"),
            *("--spec-version", SCHEMA.to_version(), environment / "bin/python"),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    bom = json.loads(listed.stdout)
    bom["components"] += [*_debian(packages), *_linked()]
    text = json.dumps(bom, indent=1, sort_keys=True)
    if errors := JsonStrictValidator(SCHEMA).validate_str(text):
        raise SystemExit(f"the SBOM does not follow the schema: {errors}")
    target.write_text(text)


def _debian(packages: Path) -> Iterator[dict[str, str]]:
    """Yield a component for each of Debian's packages."""
    for line in packages.read_text().splitlines():
        name, version, architecture = line.split("\t")
        url = f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch={architecture}"
        row = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
        yield row | {"group": "debian"}


def _linked() -> Iterator[dict[str, str]]:
    """Yield a component, without a version, for each library that is a part of libdlfs."""
    for name in ("liburing", "openssl"):
        yield {"type": "library", "bom-ref": f"linked:{name}", "name": name}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
