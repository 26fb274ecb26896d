"""The verbs of ``dlfs``, one file each: each parses, calls the public API, prints."""
