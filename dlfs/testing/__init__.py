"""Devices that watch, stop or fail on purpose, and what else tests and bench need."""
