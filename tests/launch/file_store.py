"""A folder as the callers' key-value store; and a rank that joins over one, adds up and says how it went.

file_store.py FOLDER RANK SIZE
"""

import pathlib
import sys


class Files:
    """Keys are files; a rename makes a value appear whole. Of questions for a failure, which a rank asks from time to
    time once it waits for others, each leaves a byte in "asked.RANK"."""

    def __init__(self, folder, rank):
        self._folder, self._rank = pathlib.Path(folder), rank

    def _path(self, key):
        return self._folder / key.replace("/", "_")

    def put(self, key, value):
        draft = self._folder / f"draft.{self._rank}"
        draft.write_bytes(value)
        draft.rename(self._path(key))

    def get(self, key):
        if key.endswith("failed"):
            with open(self._folder / f"asked.{self._rank}", "ab") as file:
                file.write(b".")
        path = self._path(key)
        return path.read_bytes() if path.exists() else None


def main():
    from worker import all_reduce

    from paceline import communicator

    rank, size = int(sys.argv[2]), int(sys.argv[3])
    try:
        comm = communicator.Communicator(rank, size, store=Files(sys.argv[1], rank), timeout=30)
        all_reduce(comm, 1000)
        comm.close()
    except Exception as e:
        print(type(e).__name__, e)
    else:
        print(f"rank {rank} size {size} ok")


if __name__ == "__main__":
    main()
