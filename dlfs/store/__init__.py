"""What is on a volume's members, as a whole: opening them, the newest generation, space, commit.

``members`` finds the newest generation in the superblocks, ``space`` knows the free chunks,
``chunk_writer`` and ``chunk_reader`` move runs of chunks at full depth, ``transaction`` is one
writer's hold on the volume and commits the next generation.
"""
