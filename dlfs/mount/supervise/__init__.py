"""Servers of a mount that stay in the background, and the keeper that outlives them.

``background`` is the caller's side: it starts ``daemon``, a new interpreter, and waits until the
mount answers. ``keeper`` is what that interpreter becomes where the system permits it: the process
that holds ``/dev/fuse`` and starts servers, one after the other. ``replacement`` passes a mount on
to the keeper of another version. ``inherited`` has what outlives a server, and ``processes`` what
is asked of the system about processes.

Where mount and servers belong to different containers, ``holder_process`` keeps the descriptor
instead, ``holder`` has the calls by which it gets and loses mounts, and ``held`` is the keeper of a
mount that the holder has given to it.

The keeper's mount has one state at a time::

    state    what answers     it ends when
    OPEN     nothing          the server has opened the volume: the keeper mounts        -> CONNECT
    CONNECT  nothing          the server says that it answers                            -> SERVE
    SERVE    the server       it dies -> PAUSE; or a new keeper is prepared              -> PASS
    PAUSE    nothing          the pause is over                                          -> OPEN
    PASS     nothing, then    the new keeper's server answers: this keeper ends; or not,
             the new server   in time: both are killed                                   -> OPEN

The kernel holds requests back where nothing answers, and sends again what a dead server has left
unanswered. An unmount ends the keeper in every state, and SIGTERM unmounts. A server that ends by
itself has unmounted. In the first OPEN and CONNECT, an error ends everything and detaches the
mount; later ones count as deaths. A new keeper passes through OPEN while the present one is in
SERVE, and through CONNECT while that is in PASS; each of its failures leaves the mount to the
present one. All waits have bounds, so that no process that is stopped or hangs holds the others up.
"""
