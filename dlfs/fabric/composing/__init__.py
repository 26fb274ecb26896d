"""Composes storage: creates, exports, resizes and withdraws namespaces on storage nodes.

A storage node runs a stock target and no DLFS code: Linux's nvmet, which is configured by a shell
script over ssh, or SPDK's nvmf_tgt, by JSON-RPC. ``open_target`` connects to one::

    from dlfs.fabric.composing import open_target

    with open_target("nvmet+ssh://root@10.0.0.11") as target:
        made = target.create(NamespaceRequest(
            name="scratch", size_bytes=64 << 30, store="/srv/dlfs",
            address="10.0.0.11", allowed_hosts=(host_nqn(),),
        ))
        print(made.uri)

Every namespace is composed in a subsystem of its own, whose model number is ``DLFS composed``: by
it, ``list`` knows what DLFS made, and nothing else is ever changed.
"""

from dlfs.fabric.composing.namespaces import ComposedNamespace, NamespaceRequest
from dlfs.fabric.composing.opening import open_target
from dlfs.fabric.composing.target import ComposingTarget

__all__ = ["ComposedNamespace", "ComposingTarget", "NamespaceRequest", "open_target"]
