"""Profiles: the CPU time and the instructions of a sample, by purpose."""
