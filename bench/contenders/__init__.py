"""Contenders of the cases: DLFS in each of its ways, and what it is compared with."""
