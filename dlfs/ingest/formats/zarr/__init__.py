"""The format ``zarr``: ``source`` reads arrays by the package zarr, ``listing`` checks the store.

``chunks`` finds the chunks that the store lacks.
"""
