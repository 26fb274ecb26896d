"""Whoever races in a case: DLFS in its several ways, its peers, and the limits of the machine."""
