"""Forks launches of ranks.py off one process that has imported torch: an import costs seconds a launch.

    zygote.py FD

FD is a socket; whoever holds the other end asks for a launch by a message of JSON (arguments of ranks.py, environment,
folder) along with the descriptor that shall be its output, and is told its process id. A launch ends with its output.
When the other end is closed the zygote ends; launches under way do not.
"""

import gc
import json
import os
import signal
import socket
import struct
import sys

import ranks

_LENGTH = struct.Struct("!I")


def send(connection, message, descriptors=()):
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(descriptors))
    connection.sendall(data)


def receive(connection):
    """(message, descriptors); None at the end of the connection."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    if not head:
        return None
    left, data = _LENGTH.unpack(head)[0], b""
    while left > len(data):
        more = connection.recv(left - len(data))
        if not more:
            return None
        data += more
    return json.loads(data), descriptors


def become(launch, output):
    """What is different in a process of its own; its environment as if it had begun with it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(launch["environment"])
    os.chdir(launch["folder"])


def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    ranks.import_torch()
    gc.freeze()  # a collection in a launch, as at its end, would copy every page of this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
    while (asked := receive(connection)) is not None:
        launch, (output,) = asked
        pid = os.fork()
        if pid == 0:
            connection.close()
            become(launch, output)
            ranks.run(launch["arguments"])
            return
        os.close(output)
        send(connection, pid)
    os._exit(0)


if __name__ == "__main__":
    ranks.guarded(main)
