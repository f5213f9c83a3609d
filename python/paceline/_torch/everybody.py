"""What every rank has to say, over a communicator: it names a rank that is lost, where torch may wait for it."""

import ctypes

from paceline import communicator as core

_ROW = 1024


def texts(communicator, mine, name):
    """Everybody's text, by rank, cut to a row of whole characters. Collective; name: for messages."""
    cut = mine.encode(errors="replace")[: _ROW - 1].decode(errors="ignore")
    row = ctypes.create_string_buffer(cut.encode(), _ROW)
    rows = ctypes.create_string_buffer(_ROW * communicator.size)
    communicator.run(
        core.ALL_GATHER,
        dtype=core.DTYPES["uint8"],
        input=ctypes.addressof(row),
        output=ctypes.addressof(rows),
        count=_ROW,
        name=name,
    )
    raw = rows.raw
    return [
        raw[r * _ROW : (r + 1) * _ROW].split(b"\0", 1)[0].decode(errors="replace") for r in range(communicator.size)
    ]


def largest(communicator, numbers):
    """The ranks' largest of each number. Collective."""
    values = (ctypes.c_double * len(numbers))(*numbers)
    address = ctypes.addressof(values)
    communicator.run(
        core.ALL_REDUCE,
        dtype=core.DTYPES["float64"],
        input=address,
        output=address,
        count=len(numbers),
        reduce_op=core.MAX,
        name="the ranks' largest",
    )
    return list(values)
