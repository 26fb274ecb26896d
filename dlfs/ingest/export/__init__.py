"""Export: a dataset byte for byte into a folder, an archive, a stream or a table.

``targets`` chooses the writer by the target's name: ``folder``, ``archives`` (tar, ZIP) or
``tables`` (Arrow, Parquet). Each writer takes the samples from ``samples``, in storage order.
"""
