"""The verbs of ``dlfs``, one file each: it parses, calls the public API and prints."""
