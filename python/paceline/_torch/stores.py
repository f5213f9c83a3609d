"""torch.distributed's Store as the key-value space of Paceline's bootstrap."""


class TorchStore:
    """put/get without blocking, on every kind of torch Store and every version of torch.

    A Store's get() blocks until the key is there, and its check() is missing in older versions; a counter beside
    every key says without waiting whether its value has been written.
    """

    def __init__(self, store):
        self._store = store
        self._known = {}

    def put(self, key, value):
        self._store.set(key, value)
        self._store.add(key + "#", 1)

    def get(self, key):
        if key not in self._known:
            if self._store.add(key + "#", 0) == 0:
                return None
            self._known[key] = bytes(self._store.get(key))
        return self._known[key]
