"""``python -m bench.arriving``: trains from a bucket at once, by DLFS and by its peers.

DLFS imports the bucket while the first epoch runs; its peers stream it. A line of JSON for each has
the time to the first batch and the samples a second of two epochs, and for DLFS those of the import
alone. The bucket is moto on loopback, whose speed bounds all of them in the first epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.arriving.bucket import bucket, serve, shard_urls
from bench.arriving.parts import PARTS, Job, run
from bench.command import command_line, matches
from bench.errors import Unavailable
from bench.process import ROOT, run_program
from dlfs.base.units import KIB, parse_bytes


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line("bench.arriving", __doc__, "dir")
    add = parser.add_argument
    add("--samples", type=int, default=4000, help="number of samples [4000]")
    add("--size", type=parse_bytes, default=100 * KIB, help="size of a sample [100KiB]")
    add("--only", metavar="GLOB", action="append", help="these contenders; may be given again")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--job", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run the contenders, each in a process of its own."""
    arguments = parse_arguments(words)
    if arguments.serve:
        serve(arguments.samples, arguments.size)
        return 0
    if arguments.job:
        job = Job(**json.loads(arguments.job))
        try:
            found: dict[str, object] = dict(run(job))
        except Unavailable as error:
            found = {"left out": str(error)}
        print(json.dumps({"part": job.part, **found}), flush=True)
        return 0
    arguments.dir.mkdir(parents=True, exist_ok=True)
    code = 0
    with bucket(arguments.samples, arguments.size) as environment:
        for part in filter(lambda name: matches(name, arguments.only), PARTS):
            folder = Path(tempfile.mkdtemp(prefix="dlfs-arriving-", dir=arguments.dir))
            try:
                files = "s3://bucket/files"
                sizes = arguments.samples, arguments.size
                job = Job(part, str(folder), files, shard_urls(), *sizes)
                command = [sys.executable, "-m", "bench.arriving", "--job"]
                command.append(json.dumps(asdict(job)))
                variables = {**os.environ, **environment}
                code |= subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    run_program(main)
