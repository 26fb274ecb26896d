"""One dataset: ``dataset`` reads its samples, ``writer`` makes it."""
