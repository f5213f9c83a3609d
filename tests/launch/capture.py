"""Runs a command in a network of its own and looks at what goes through it: capture.py FILE COMMAND…

FILE gets a line for each frame of Paceline's wire (src/wire/frame.h) that begins a TCP segment and has a payload:
{"type", "bytes": of the payload, "has_sum", "is_right": whether the sum is the payload's, null where the segment does
not hold all of it}.
"""

import json
import pathlib
import socket
import subprocess
import sys
import threading

ALL_PROTOCOLS, SO_RCVBUFFORCE = 3, 33  # Linux's
HEADER, SUM_FLAG, TYPES = 64, 1, {1: "note", 2: "eager", 16: "piece"}


def table_of(polynomial):
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    return table


TABLE = table_of(0x82F63B78)  # CRC-32C


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def number(data, at):
    return int.from_bytes(data[at : at + 4], "little")


def segment_of(packet):
    """TCP's payload of an IPv4 packet behind an Ethernet header."""
    ip = packet[14:]
    if len(ip) < 20 or ip[0] >> 4 != 4 or ip[9] != socket.IPPROTO_TCP:
        return b""
    tcp = ip[4 * (ip[0] & 15) : int.from_bytes(ip[2:4], "big") or None]
    return tcp[4 * (tcp[12] >> 4) :]


def frame_of(segment):
    if len(segment) < HEADER or segment[4] not in TYPES or number(segment, 0) != crc32c(segment[4:HEADER]):
        return None
    length = number(segment, 8)
    payload = segment[HEADER : HEADER + length]
    has_sum = bool(segment[5] & SUM_FLAG)
    whole = len(payload) == length <= 4096  # this sum is slow
    is_right = number(segment, 60) == crc32c(payload) if has_sum and whole else None
    return {"type": TYPES[segment[4]], "bytes": length, "has_sum": has_sum, "is_right": is_right}


def main():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    sniffer.bind(("lo", 0))
    sniffer.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    sniffer.settimeout(0.5)
    ended = threading.Event()
    packets = []

    def listen():
        while True:
            try:
                packets.append(sniffer.recv(1 << 17))
            except TimeoutError:
                if ended.is_set():
                    return

    listener = threading.Thread(target=listen)
    listener.start()
    code = subprocess.run(sys.argv[2:]).returncode
    ended.set()
    listener.join()
    frames = filter(None, map(frame_of, map(segment_of, packets)))
    pathlib.Path(sys.argv[1]).write_text("".join(json.dumps(frame) + "\n" for frame in frames))
    sys.exit(code)


if __name__ == "__main__":
    main()
