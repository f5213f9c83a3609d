"""The C ABI's communicator for Python: pointers and counts, no framework, no NumPy.

An operation is submitted and then either waited for (:meth:`Communicator.wait`, on the calling thread, without the
interpreter lock) or watched (:meth:`Communicator.watch`: a thread of the communicator, started with the first watched
operation, calls back; _completions.py). Buffers belong to the caller until the operation has ended;
``keep`` holds whatever must stay alive until then.
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import socket
import sys
import threading
import weakref
from ctypes import byref, c_float, c_int32, c_uint32, c_uint64, c_void_p

from paceline import _library
from paceline._completions import Completions
from paceline.errors import InvalidArgumentError, MismatchError, PacelineError, UnsupportedError, from_code

DTYPES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "bool": 9,
}
SUM, AVERAGE, MIN, MAX, PRODUCT = range(5)
ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER, REDUCE, GATHER, SCATTER = range(9)
CODEC_SETTINGS, CODEC_NONE, CODEC_FP16, CODEC_BF16, CODEC_TOPK = -1, 0, 1, 2, 3

_GET_ABSENT = -1
_GET_FAILED = -2


class Identity:
    """Who this rank is: rank, size, local_rank, local_size, node, node_count."""

    __slots__ = ("local_rank", "local_size", "node", "node_count", "rank", "size")

    def __init__(self, raw):
        for name in self.__slots__:
            setattr(self, name, getattr(raw, name))


class _StoreBridge:
    """A Python key-value store (put(key, bytes), get(key) -> bytes or None) behind the C ABI's paceline_store.

    Exceptions can't cross C: the first one is kept in ``error`` for whoever called paceline_comm_create.
    """

    def __init__(self, store):
        self._store = store
        self.error = None
        self.raw = _library.Store(put=_library.StorePut(self._put), get=_library.StoreGet(self._get))

    def _put(self, _context, key, value, size):
        try:
            self._store.put(key.decode(), ctypes.string_at(value, size) if size else b"")
            return 0
        except BaseException as error:
            self.error = self.error or error
            return 1

    def _get(self, _context, key, value, capacity):
        try:
            found = self._store.get(key.decode())
            if found is None:
                return _GET_ABSENT
            size = min(len(found), capacity)
            if size:
                ctypes.memmove(value, found, size)
            return len(found)
        except BaseException as error:
            self.error = self.error or error
            return _GET_FAILED


class Prepared:
    """The arguments of an operation as the C ABI takes them. A model's hook has some microseconds for each bucket."""

    __slots__ = ("arguments", "operation", "operation_reference", "reference")

    def __init__(self, arguments):
        self.arguments = arguments
        self.operation = c_uint64()
        self.reference = byref(arguments)
        self.operation_reference = byref(self.operation)


class Communicator:
    """A set of ranks that carry out collectives together.

    rank, size: -1 asks the launcher's environment. store: an object with put(key, bytes) and
    get(key) -> bytes | None that all ranks reach, or None for the launcher's. prefix tells communicators of one job
    apart. face: the settings' family ("paceline", "perseus", "tiacc_training", "light", "horovod").
    timeout: seconds, for all ranks to come and of operations, 0 for the settings'; operation_timeout: of operations,
    where it is another. job_rank: who this process is in the whole job, for messages, where these
    are some of the job's ranks; None for what the launcher says of a job of at least size ranks, else rank. Blocks
    until all ranks are there. Raises a PacelineError named by the failure.
    """

    def __init__(
        self,
        rank=-1,
        size=-1,
        store=None,
        prefix="",
        face="paceline",
        timeout=0.0,
        job_rank=None,
        operation_timeout=0.0,
    ):
        self._library = _library.load()
        self._submit = self._library.paceline_submit
        self._handle = None
        self._lock = threading.RLock()
        self._completions = Completions(self)
        self._closing = self._ended = False
        self._is_told = False  # whether somebody has heard of the failure that ended this communicator
        self._before_close = []
        self._interrupted = {}  # results by operation: it was released, and a signal's handler raised in wait()
        self._pid = os.getpid()
        bridge = _StoreBridge(store) if store is not None else None
        options = _library.CommOptions(
            rank=rank,
            size=size,
            store_prefix=prefix.encode(),
            store=ctypes.pointer(bridge.raw) if bridge else None,
            face=face.encode(),
            timeout_s=timeout,
            job_rank=None if job_rank is None else ctypes.pointer(ctypes.c_int32(job_rank)),
            operation_timeout_s=operation_timeout,
        )
        handle = c_void_p()
        code = self._library.paceline_comm_create(byref(options), byref(handle))
        if code:
            error = from_code(code, _text(self._library.paceline_error(None)))
            raise error from (bridge.error if bridge else None)
        self._handle = handle
        self._serial = next(_serials)
        self._group_sizes = {}
        raw = _library.Identity()
        self._check(self._library.paceline_comm_identity(handle, byref(raw)))
        self.identity = Identity(raw)
        self.rank = raw.rank
        self.size = raw.size
        self._group_sizes[0] = raw.size
        _live[self._serial] = self

    # --- operations -----------------------------------------------------------------------------------------------

    def submit(self, collective, **arguments):
        """Queues a collective and returns its operation id at once.

        dtype: a code of DTYPES; input, output: addresses; count: elements; reduce_op, root, group, codec, algorithm:
        the C ABI's codes; counts, send_counts, receive_counts: one number a rank of the group; segments: (key,
        offset, elements) of the parameters that the buffer holds, or an array made by :func:`segment_array`;
        name, shape: for messages; timeout: seconds, 0 for the communicator's; window: not 0: begins once the operations
        with a window that have begun and not ended hold fewer bytes, so what is submitted first arrives first.
        """
        return self.submit_prepared(self.prepare(collective, **arguments), arguments.get("window", 0))

    def prepare(self, collective, **arguments):
        """The arguments of :meth:`submit`, laid out once for any number of :meth:`submit_prepared`."""
        return Prepared(self._op_args(collective, **arguments))

    def submit_prepared(self, prepared, window=0):
        """:meth:`submit` of what :meth:`prepare` has returned."""
        prepared.arguments.window_bytes = window
        code = self._submit(self._handle, prepared.reference, prepared.operation_reference)
        if code:
            self._open_handle()
            self._check(code)
        return prepared.operation.value

    def run(self, collective, **arguments):
        """submit() and wait() in one call, on the calling thread where that is faster. Returns True when finite."""
        args = self._op_args(collective, **arguments)
        result = _library.Result()
        code = self._library.paceline_run(self._handle, byref(args), byref(result))
        if code:
            raise self._failure(code, self._sentence(self._handle, result.op))
        return bool(result.finite)

    def send(self, pointer, size, peer, tag=0, group=0, name="", timeout=0.0, shape=""):
        """Queues `size` bytes for rank `peer` of the group. Returns the operation id. shape: see receive()."""
        return self._transfer(self._library.paceline_send, pointer, size, peer, tag, group, name, timeout, shape)

    def receive(self, pointer, size, peer, tag=0, group=0, name="", timeout=0.0, shape=""):
        """Queues the receipt of `size` bytes from rank `peer` of the group. Returns the operation id.

        shape: "float32 [2, 3]"; a message of another shape, or without one, is an error on both sides.
        """
        return self._transfer(self._library.paceline_receive, pointer, size, peer, tag, group, name, timeout, shape)

    def test(self, op):
        """True once the operation has ended."""
        return op in self._interrupted or bool(self._library.paceline_test(self._handle, op))

    def give_way(self, op, seconds):
        """While all cores are busy, sleeps until this node's ranks have reached the operation; at most `seconds`."""
        return bool(self._library.paceline_give_way(self._handle, op, seconds))

    def wait(self, op, timeout=-1.0):
        """Waits for an operation and releases it; raises its failure. Returns False where top-k saw Inf or NaN.

        A signal's handler runs when the operation has ended: where it raises (KeyboardInterrupt), the operation may be
        waited for again.
        """
        result = self._interrupted[op] if op in self._interrupted else _library.Result()
        try:
            code = result.code if result.op else self._library.paceline_wait(self._handle, op, timeout, byref(result))
            if code:
                self._open_handle()
            error = self._failure(code, self._sentence(self._handle, op)) if code else None
            finite = bool(result.finite)
        except BaseException:
            if result.op:  # written when it was released
                self._interrupted[op] = result
            raise
        if op in self._interrupted:
            del self._interrupted[op]
        if error is not None:
            raise error
        return finite

    def watch(self, op, callback, keep=None):
        """Calls callback(error or None, finite) from a completion thread when the operation has ended.

        One callback at a time, unless one waits for another operation or takes long.
        """
        if op in self._interrupted:
            result = self._interrupted.pop(op)
            error = self._failure(result.code, self._sentence(self._handle, op)) if result.code else None
            callback(error, bool(result.finite))
            return
        self._completions.expect(op, callback, keep)
        code = self._library.paceline_watch(self._handle, op)
        if code:
            self._completions.forget(op)
            raise self._failure(code, self._sentence(self._handle, op))

    # --- groups ---------------------------------------------------------------------------------------------------

    def create_group(self, ranks):
        """A group over world ranks (their order is the group's numbering). All members call in the same order."""
        array = (c_int32 * len(ranks))(*ranks)
        group = c_uint32()
        self._check(self._library.paceline_group_create(self._handle, array, len(ranks), byref(group)))
        self._group_sizes[group.value] = len(ranks)
        return group.value

    def destroy_group(self, group):
        self._check(self._library.paceline_group_destroy(self._handle, group))
        self._group_sizes.pop(group, None)

    def trim(self):
        """Frees memory that is kept for operations of sizes that don't come any more."""
        self._check(self._library.paceline_trim(self._handle))

    # --- residuals of top-k -----------------------------------------------------------------------------------------

    def commit_residuals(self, keys=None):
        """Ends the step of the parameters with these residual keys, of all by default: what it has left is kept."""
        self._check(self._library.paceline_residual_commit(self._handle, *key_array(keys)))

    def rollback_residuals(self, keys=None):
        """The same, and residuals return to their values before the step."""
        self._check(self._library.paceline_residual_rollback(self._handle, *key_array(keys)))

    def scale_residuals(self, factor):
        self._check(self._library.paceline_residual_scale(self._handle, factor))

    def read_residual(self, key, pointer, elements):
        """Copies a parameter's residual (float32) to `pointer`; elements never seen read as 0."""
        data = ctypes.cast(pointer, ctypes.POINTER(c_float))
        self._check(self._library.paceline_residual_read(self._handle, key, data, elements))

    def write_residual(self, key, pointer, elements):
        data = ctypes.cast(pointer, ctypes.POINTER(c_float))
        self._check(self._library.paceline_residual_write(self._handle, key, data, elements))

    # --- life -----------------------------------------------------------------------------------------------------

    def share(self, pointer, size):
        """Memory that the node's other ranks reach in place from now on: see paceline_share() in comm.h.

        Raises ResourceExhaustedError where there is no shared memory.
        """
        self._check(self._library.paceline_share(self._open_handle(), pointer, size))

    def unshare(self, pointer):
        """Undoes share(); nothing to do where the communicator is closed, or another process's.

        Raises UnsupportedError while it is being closed: its end undoes it, the memory must last until then.
        """
        if self._ended or self._pid != os.getpid():
            return
        if self._closing:
            raise UnsupportedError("this communicator is being closed; its end makes the memory private again")
        self._check(self._library.paceline_unshare(self._handle, pointer))

    @property
    def closed(self):
        return self._handle is None

    def describe(self):
        """The start-up line: ranks × nodes, wire, plan, codec."""
        return _text(self._library.paceline_comm_describe(self._open_handle()))

    def stats(self):
        """Counters as a dict: operations, payload and wire bytes, plans, scratch and residual memory."""
        raw = _library.Stats()
        self._check(self._library.paceline_comm_stats(self._handle, byref(raw)))
        return {name: getattr(raw, name) for name, _ in raw._fields_ if name != "struct_size"}

    def check_health(self):
        """Raises the failure that ended this communicator, if one did. From any thread."""
        with self._lock:  # nobody frees the handle meanwhile
            self._check(self._library.paceline_comm_health(self._open_handle()))

    def abort(self, reason):
        """Ends all operations here and on all ranks with `reason`; returns at once."""
        with self._lock:
            if self._handle is not None and self._pid == os.getpid():
                self._is_told = True
                self._library.paceline_comm_abort(self._handle, reason.encode())

    def before_close(self, action):
        """action() is called once, before the handle is freed: what was built on this communicator ends first."""
        self._before_close.append(action)

    def close(self):
        """Orderly end: waits until all ranks have called it (at most the time-out), then frees the handle.

        A failure that nobody here has heard of (a broadcast's root does not wait for the others) is said on stderr;
        where ranks ran different operations whoever gathers mismatches() gets the error instead.
        """
        with self._lock:
            if self._closing or self._handle is None:
                return
            self._closing = True
        _live.pop(self._serial, None)
        if self._pid != os.getpid():
            return
        for action in reversed(self._before_close):
            action()
        self._completions.close(self._wake_completions)
        with self._lock:
            handle, self._handle = self._handle, None
        code = self._library.paceline_comm_destroy(handle)
        self._ended = True
        if code and not self._is_told:
            error = from_code(code, _text(self._library.paceline_error(None)))
            if _mismatches is not None and isinstance(error, MismatchError):
                _mismatches.append((self.rank, error))
            else:
                _say(self.rank, error)
        for callback in self._completions.left():
            callback(from_code(5, "the communicator was closed while the operation was under way"), True)

    def _wake_completions(self):
        """Their threads must have left the C ABI before the handle is freed; an operation with itself wakes one."""
        is_told = self._is_told
        try:
            alone = self.create_group([self.rank])
            self.watch(self.submit(BARRIER, group=alone, name="close"), lambda error, finite: None)
        except PacelineError:
            self._is_told = is_told  # failed already: the threads look up by themselves soon

    # --- inside ---------------------------------------------------------------------------------------------------

    def _op_args(
        self,
        collective,
        dtype=0,
        input=None,
        output=None,
        count=0,
        reduce_op=SUM,
        root=0,
        group=0,
        codec=CODEC_NONE,
        algorithm=0,
        counts=None,
        send_counts=None,
        receive_counts=None,
        segments=None,
        name="",
        shape="",
        timeout=0.0,
        window=0,
    ):
        self._open_handle()
        args = _library.OpArgs(
            collective=collective,
            dtype=dtype,
            reduce_op=reduce_op,
            root=root,
            group=group,
            algorithm=algorithm,
            codec=codec,
            fp16_values=-1,
            input=input,
            output=output,
            count=count,
            name=name.encode(),
            shape=shape.encode(),
            timeout_s=timeout,
            window_bytes=window,
        )
        if counts is not None:
            args.counts = self._per_rank("counts", counts, group)
        if send_counts is not None:
            args.send_counts = self._per_rank("send_counts", send_counts, group)
        if receive_counts is not None:
            args.receive_counts = self._per_rank("receive_counts", receive_counts, group)
        if segments is not None:
            array = segments if isinstance(segments, ctypes.Array) else segment_array(segments)
            args.segments = array
            args.segment_count = len(array)
        return args

    def _per_rank(self, what, numbers, group):
        """The array that C reads, which does not know how long it is."""
        size = self._group_sizes.get(group, len(numbers))  # an unknown group is refused there
        if len(numbers) != size or any(not 0 <= n < 1 << 64 for n in numbers):
            raise InvalidArgumentError(
                f"{what} is {list(numbers)}: one number a rank of the group, {size} in all, from 0 on, is wanted"
            )
        return (c_uint64 * size)(*numbers)

    def _transfer(self, function, pointer, size, peer, tag, group, name, timeout, shape):
        args = _library.TransferArgs(
            group=group,
            peer=peer,
            tag=tag,
            data=pointer,
            bytes=size,
            name=name.encode(),
            timeout_s=timeout,
            shape=shape.encode(),
        )
        op = c_uint64()
        self._check(function(self._open_handle(), byref(args), byref(op)))
        return op.value

    def _open_handle(self):
        if self._handle is None:
            raise UnsupportedError("this communicator is closed; create a new one")
        return self._handle

    def _sentence(self, handle, op):
        text = ctypes.create_string_buffer(2048)
        length = self._library.paceline_op_error(handle, op, text, len(text)) if op else 0
        return _text(text.value if length else self._library.paceline_error(handle))

    def _check(self, code):
        if code:
            self._open_handle()
            raise self._failure(code, _text(self._library.paceline_error(self._handle)))

    def _failure(self, code, sentence):
        """The error to raise or to hand over; close() need not tell it any more."""
        error = from_code(code, sentence)
        self._is_told = self._is_told or not isinstance(error, (InvalidArgumentError, UnsupportedError))
        return error


def segment_array(segments):
    """(key, offset, elements) triples as the C ABI's array; make it once a bucket layout."""
    array = (_library.Segment * len(segments))()
    for slot, (key, offset, elements) in zip(array, segments):
        slot.key, slot.offset, slot.elements = key, offset, elements
    return array


def key_array(keys):
    """(pointer, count) of residual keys for the C ABI; None stands for all."""
    return (None, 0) if keys is None else ((ctypes.c_uint64 * len(keys))(*keys), len(keys))


def setting(name, face="paceline"):
    """The value of a setting by canonical name ("topk_ratio") as text; "" when there is no such setting."""
    return _library.read_text(_library.load().paceline_setting, face.encode(), name.encode())


def setting_source(name, face="paceline"):
    """Where a setting's value comes from: the variable's name, or "" for the default."""
    return _setting_row(name, face)["source"]


def setting_precedence(name, face="paceline"):
    """Of two settings about one thing the one whose number is lower wins: its variable's family comes first."""
    return _setting_row(name, face)["precedence"]


def _setting_row(name, face):
    text = _library.read_text(_library.load().paceline_settings_json, face.encode())
    if not text:
        check_settings(face)  # raises what is wrong with them
    table = json.loads(text)
    return next(row for row in table if row["name"] == name)


def check_settings(face="paceline"):
    """Checks the environment. Returns the warnings as a list; raises InvalidArgumentError that names the variable."""
    library = _library.load()
    text = ctypes.create_string_buffer(1 << 16)
    code = library.paceline_settings_check(face.encode(), text, len(text))
    if code:
        raise from_code(code, _text(library.paceline_error(None)))
    return [line for line in _text(text.value).splitlines() if line]


def warn_of_settings(job_rank, face="paceline"):
    """check_settings() that says the warnings as a communicator does: where job_rank is 0, each once a process."""
    library = _library.load()
    code = library.paceline_settings_warn(face.encode(), job_rank)
    if code:
        raise from_code(code, _text(library.paceline_error(None)))


def _text(raw):
    return raw.decode("utf-8", "replace") if raw else ""


@contextlib.contextmanager
def mismatches():
    """Gives a list; inside, close() adds (rank, MismatchError) to it for what nobody on this rank has heard of.

    Who raises one takes it from the list; those that are left are said on stderr, also where the caller failed.
    """
    global _mismatches
    outer, _mismatches = _mismatches, []
    gathered = _mismatches
    try:
        yield gathered
    finally:
        _mismatches = outer
        for rank, error in gathered:
            _say(rank, error)


def _say(rank, error):
    print(f"paceline: rank {rank}: {error}", file=sys.stderr, flush=True)


def open_communicators():
    """All that this process has made and not closed."""
    return list(_live.values())


_mismatches = None
_live = weakref.WeakValueDictionary()
_serials = itertools.count()


def _close_all():
    """At interpreter exit: after an exception the other ranks are told at once, otherwise an orderly end.

    An end waits for the other ranks, so all must come in the same order: the last one made ends first.
    """
    failed = getattr(sys, "last_value", None)
    for _, communicator in sorted(_live.items(), reverse=True):
        if failed is not None:
            communicator.abort(
                f"rank {communicator.rank} (host {socket.gethostname()}) ended with {type(failed).__name__}: {failed}"
            )
        communicator.close()


def _forget_all():
    """In a forked child the parent's handles must not be touched."""
    for communicator in list(_live.values()):
        communicator._handle = None
        communicator._lock = threading.RLock()  # another thread may have had it
    _live.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
