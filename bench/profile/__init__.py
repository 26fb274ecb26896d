"""Where the time of a sample goes: ``python -m bench.profile cached cold mount``."""
