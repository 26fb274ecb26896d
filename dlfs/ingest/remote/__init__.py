"""Sources behind URLs: ``s3://``, ``gs://``, ``az://``, ``hf://``, ``https://``, all of fsspec.

``Spool`` fetches the objects that URLs name into a spool directory. Where each object is a sample,
as in a folder, ``objects`` reads them from the ``blocks`` of the spool, in the order of packing.
Every other format reads local files: it opens copies under their own names, when all are there, or
if they are too many, while further ones are fetched. ``stores`` lists and reads objects,
``fetching`` has the requests, ``manifest`` records the complete ones, ``digests`` checks them,
``failures`` decides which errors are worth another attempt, and ``source`` deletes copies when
their samples are committed.
"""
