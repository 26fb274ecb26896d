"""The format ``lmdb``: ``source`` turns keys into samples, ``pages`` reads the file's B+tree."""
