"""Sources behind URLs: ``s3://``, ``gs://``, ``az://``, ``hf://``, ``https://``, all of fsspec.

Every format reads local files. So ``Spool`` fetches the objects that URLs name into a spool
directory, under their own names, and the format opens these copies: when all are there, or if they
are too many, while further ones are fetched. ``stores`` lists and reads objects, ``manifest``
records the complete ones, ``digests`` checks them, ``failures`` decides which errors are worth
another attempt, and ``source`` deletes copies when their samples are committed.
"""
