"""The CSI driver of DLFS: shows volumes as files in pods, and composes volumes on storage nodes.

``python -m dlfs_csi`` answers a container orchestrator on a Unix socket: the identity and node
services on each node, the controller service once a cluster. ``node`` has what a published volume
consists of; ``wire`` the messages; ``context`` what a request may ask for; ``launching`` how
servers are started, as pods (``pods``) or processes (``processes``).

Imports point down this list: ``__main__``, ``service``, ``node`` and ``controller``, the others.
"""

DRIVER_NAME = "csi.dlfs"
VERSION = "0.1.0"
