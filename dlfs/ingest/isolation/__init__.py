"""Reads sources in a separate process, because damaged files crash the libraries of some formats.

``process`` starts the process; ``source`` takes blocks of samples from it; ``worker`` runs in it;
``confines`` is its memory limit, and the note of what it reads, for the error about its end.
``registry.Format.isolated`` says which formats are read so.
"""
