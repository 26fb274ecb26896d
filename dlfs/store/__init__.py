"""Opens the members of a volume, reads and writes their chunks, and commits generations.

``members`` opens the devices and finds the newest generation in the superblocks. ``space`` has the
free chunks. ``chunk_writer`` and ``chunk_reader`` transfer runs of chunks at full queue depth.
``transaction`` locks the volume for one writer and commits the next generation. ``newest`` loads
the newest generation of an open volume.
"""
