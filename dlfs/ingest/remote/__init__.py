"""Sources behind URLs: ``s3://``, ``gs://``, ``az://``, ``hf://``, ``https://``, all of fsspec.

Every format reads local files. So ``Spool`` first fetches the objects that URLs name into a spool
directory, under their own names, and the format opens these copies. ``stores`` lists and reads
objects, ``manifest`` records the complete ones, ``digests`` checks them, ``failures`` decides which
errors are worth another attempt, and ``source`` deletes the copies when the dataset is sealed.
"""
