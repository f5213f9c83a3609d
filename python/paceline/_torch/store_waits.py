"""A wait of torch's own in the store by which ranks meet ends when one of them is lost.

Where groups are made, torch's backends wait there for every member's address, for the whole of the group's time-out:
half an hour for Gloo, where nothing else is said. The only way to end that from outside is the connection's end.
"""

import contextlib
import os
import socket

import torch.distributed as dist

from paceline._torch import guard


class _Waiting:
    """What the guard's thread looks after while torch may wait."""

    def __init__(self, is_lost, store):
        self._is_lost = is_lost
        self._store = store

    def look(self):
        if self._is_lost():
            with contextlib.suppress(OSError):  # the store's host is not found any more, say
                disconnect(self._store)

    def hear(self):
        return None


@contextlib.contextmanager
def ending_with_a_loss(is_lost):
    """Within, what waits in the default group's store fails some moments after is_lost() has become true."""
    if not dist.is_initialized():
        yield
        return
    waiting = _Waiting(is_lost, dist.distributed_c10d._get_default_store())
    guard.watch(waiting)
    try:
        yield
    finally:
        guard.unwatch(waiting)


def disconnect(store):
    """Ends this process's connections to where a TCPStore is served; one that is served here goes on serving others.

    Stores of other kinds stay as they are.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    served = {address[:2] for *_, address in found}
    for one in _sockets():
        with one, contextlib.suppress(OSError):  # it may have ended meanwhile
            peer = one.getpeername()
            if isinstance(peer, tuple) and (_plain(peer[0]), peer[1]) in served:
                one.shutdown(socket.SHUT_RDWR)


def _sockets():
    """Of this process, each by a descriptor of its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            copy = os.dup(int(name))
            try:
                one = socket.socket(fileno=copy)
            except OSError:  # no socket
                os.close(copy)
                continue
            yield one


def _plain(host):
    """An IPv4 address as IPv4 writes it, where a socket of IPv6 carries it."""
    return host[len("::ffff:") :] if host.startswith("::ffff:") else host
