"""Between Hydra and a rank: the job's secret reaches this rank with its last digit changed.

pmi_forger.py COMMAND … with PMI_FD set; ends as the command does.
"""

import os
import re
import select
import socket
import subprocess
import sys

#: 64 hexadecimal digits, each as the two digits of its character, behind the number of parts.
SECRET = re.compile(rb"value=0001(?:3[0-9]|6[1-6]){63}(3[0-9]|6[1-6])\b")


def forge(found):
    return found[0][:-2] + (b"31" if found[1] == b"30" else b"30")


def main():
    hydra = socket.socket(fileno=int(os.environ["PMI_FD"]))
    ours, ranks = socket.socketpair()
    environment = {**os.environ, "PMI_FD": str(ranks.fileno())}
    rank = subprocess.Popen(sys.argv[1:], env=environment, pass_fds=[ranks.fileno()])
    ranks.close()
    lines = b""
    while True:
        ready, _, _ = select.select([hydra, ours], [], [])
        if ours in ready:
            said = ours.recv(4096)
            if not said:
                return rank.wait()
            hydra.sendall(said)
        if hydra in ready:
            heard = hydra.recv(4096)
            if not heard:
                return rank.wait()
            lines += heard
            whole, newline, lines = lines.rpartition(b"\n")
            forged, count = SECRET.subn(forge, whole)
            ours.sendall(forged + newline)
            if count:
                print("a secret was changed on its way", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
