"""The node service: one process of a node reads volumes on behalf of all training processes.

The service's side: ``NodeService`` (``process``) is the process that ``dlfs serve`` runs. It holds
the volumes and a ``DatasetCache`` (``dataset_cache``), listens on a Unix socket (``sockets``) and
runs a ``SampleServer`` (``server``), which serves each client in a ``Session`` (``session``).
All sessions share a ``ServerState`` (``state``); ``attachments`` changes which volumes it has.
``metrics`` exports the counters to Prometheus; ``systemd`` notifies systemd.

The client's side: ``connect`` (``client``) opens a volume through a ``ControlConnection``
(``control``). Both sides exchange the messages of ``protocol`` and pass a volume's superblock and
catalog as a ``generation_file``. Samples do not pass through the socket: they lie in memory that
service and clients share (``dlfs._native.channel``, ``dlfs._native.server_channel``).

``statistics`` computes rates and latencies from counters, for ``dlfs top`` and ``dlfs stall``.
"""
