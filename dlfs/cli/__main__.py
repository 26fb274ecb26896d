"""Runs the command line as ``python -m dlfs.cli``."""

from dlfs.cli import main

main()
