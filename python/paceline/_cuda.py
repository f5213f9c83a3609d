"""Finds libpaceline_cuda.so and declares include/paceline/cuda.h: collectives on CUDA tensors, ordered by streams.

Pointers, counts and stream handles, no framework. The library lies beside libpaceline.so; it loads without a GPU and
says through :func:`missing` what a machine lacks.
"""

import ctypes
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p

from paceline import _library
from paceline import communicator as core
from paceline.errors import LibraryNotFoundError, PacelineError, UnsupportedError, from_code

NAME = "libpaceline_cuda.so"
CODEC_SETTINGS, CODEC_NONE, CODEC_FP16, CODEC_BF16, CODEC_TOPK, CODEC_INT8 = -1, 0, 1, 2, 3, 4
#: The dtypes that the path reduces, by their name.
DTYPES = {name: core.DTYPES[name] for name in ("float32", "float16", "bfloat16")}


class CudaOptions(_library._Sized):
    _fields_ = [  # noqa: RUF012
        ("struct_size", c_size_t),
        ("device", c_int32),
        ("lanes", c_int32),
        ("piece_bytes", c_uint64),
        ("nccl_library", c_char_p),
        ("pinned_bytes", c_uint64),
        ("only_prompt", c_int32),
    ]


class CudaArgs(_library._Sized):
    _fields_ = [  # noqa: RUF012
        ("struct_size", c_size_t),
        ("data", c_void_p),
        ("count", c_uint64),
        ("dtype", c_int32),
        ("reduce_op", c_int32),
        ("codec", c_int32),
        ("ratio", c_double),
        ("momentum", c_double),
        ("segments", POINTER(_library.Segment)),
        ("segment_count", c_size_t),
        ("stream", c_void_p),
        ("name", c_char_p),
        ("factor", c_double),
        ("row_elements", c_uint64),
        ("prompt", c_int32),
    ]


class CudaCollectiveArgs(_library._Sized):
    _fields_ = [  # noqa: RUF012
        ("struct_size", c_size_t),
        ("collective", c_int32),
        ("dtype", c_int32),
        ("reduce_op", c_int32),
        ("codec", c_int32),
        ("root", c_int32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("count", c_uint64),
        ("factor", c_double),
        ("scratch", c_void_p),
        ("scratch_bytes", c_uint64),
        ("stream", c_void_p),
        ("name", c_char_p),
    ]


class CudaStats(_library._Sized):
    _fields_ = [  # noqa: RUF012
        ("struct_size", c_size_t),
        ("operations", c_uint64),
        ("wire_bytes", c_uint64),
        ("device_bytes", c_uint64),
        ("pinned_bytes", c_uint64),
        ("residual_bytes", c_uint64),
        ("rows_sent", c_uint64),
        ("rows_bound", c_uint64),
        ("pass_ns_waiting", c_uint64),
        ("pass_ns_ahead", c_uint64),
        ("saturated", c_uint64),
    ]


_CODE = c_int
_CUDA = c_void_p
PROTOTYPES = {
    "paceline_cuda_available": (c_int, [c_char_p, c_size_t]),
    "paceline_cuda_create": (_CODE, [c_void_p, POINTER(CudaOptions), POINTER(_CUDA)]),
    "paceline_cuda_reserve": (_CODE, [_CUDA, c_uint64, c_uint64]),
    "paceline_cuda_all_reduce": (_CODE, [_CUDA, POINTER(CudaArgs), POINTER(c_uint64)]),
    "paceline_cuda_collective": (_CODE, [_CUDA, POINTER(CudaCollectiveArgs), POINTER(c_uint64)]),
    "paceline_cuda_scratch": (_CODE, [_CUDA, POINTER(CudaCollectiveArgs), POINTER(c_uint64)]),
    "paceline_cuda_join": (_CODE, [_CUDA, c_uint64, c_void_p]),
    "paceline_cuda_wait_arrival": (_CODE, [_CUDA, c_double, POINTER(c_int32)]),
    "paceline_cuda_wait_operation": (_CODE, [_CUDA, c_uint64, c_double, POINTER(c_int32)]),
    "paceline_cuda_not_finite": (c_uint64, [_CUDA, POINTER(c_uint64), c_uint64]),
    "paceline_cuda_arrived": (c_int, [_CUDA, c_uint64]),
    "paceline_cuda_gate": (_CODE, [_CUDA, POINTER(c_uint64)]),
    "paceline_cuda_rest": (_CODE, [_CUDA]),
    "paceline_cuda_abort": (_CODE, [_CUDA, c_char_p]),
    "paceline_cuda_destroy": (_CODE, [_CUDA]),
    "paceline_cuda_describe": (c_char_p, [_CUDA]),
    "paceline_cuda_error": (c_char_p, [_CUDA]),
    "paceline_cuda_stats_get": (_CODE, [_CUDA, POINTER(CudaStats)]),
    "paceline_cuda_residual_commit": (_CODE, [_CUDA, POINTER(c_uint64), c_uint64]),
    "paceline_cuda_residual_rollback": (_CODE, [_CUDA, POINTER(c_uint64), c_uint64]),
    "paceline_cuda_residual_scale": (_CODE, [_CUDA, c_double, POINTER(c_uint64), c_uint64]),
    "paceline_cuda_residual_read": (_CODE, [_CUDA, c_uint64, POINTER(c_float), c_uint64]),
    "paceline_cuda_residual_write": (_CODE, [_CUDA, c_uint64, POINTER(c_float), c_uint64]),
    "paceline_cuda_velocity_read": (_CODE, [_CUDA, c_uint64, POINTER(c_float), c_uint64]),
    "paceline_cuda_velocity_write": (_CODE, [_CUDA, c_uint64, POINTER(c_float), c_uint64]),
}

_lock = threading.Lock()
_loaded = None


def path():
    """Where the library has to lie: beside libpaceline.so."""
    return os.path.join(os.path.dirname(os.path.abspath(_library.load()._name)), NAME)


def load():
    """The library, loaded once per process. Raises LibraryNotFoundError that names the file and the fix."""
    global _loaded
    with _lock:
        if _loaded is None:
            where = path()
            if not os.path.exists(where):
                raise LibraryNotFoundError(
                    f"{where} is not there; install the paceline wheel, or build the source tree with ./dev build"
                )
            try:
                library = ctypes.CDLL(where)
            except OSError as error:
                raise LibraryNotFoundError(f"{where} can't be loaded: {error}") from None
            for name, (result, arguments) in PROTOTYPES.items():
                try:
                    function = getattr(library, name)
                except AttributeError:
                    raise LibraryNotFoundError(
                        f"{where} has no {name}(): it was built from another version than this Python package; build "
                        "or install both together"
                    ) from None
                function.restype, function.argtypes = result, arguments
            _loaded = library
        return _loaded


def missing():
    """What this machine lacks for the path, as a sentence; "" when nothing."""
    try:
        library = load()
    except LibraryNotFoundError as error:
        return str(error)
    text = ctypes.create_string_buffer(1024)
    return "" if library.paceline_cuda_available(text, len(text)) else core._text(text.value) or "no reason was given"


class CudaCommunicator:
    """Collectives on device memory over the ranks of a :class:`paceline.Communicator`, which it takes over.

    Creation is collective and blocks; all ranks submit the same operations in the same order, from one thread at a
    time. lanes: 0 is what the settings say; piece_bytes: 0 is 4 MiB. nccl: path of NCCL's library, or None for the one
    in the process. pinned: bytes of host memory for what is under way, at least. only_prompt: all-reduces will be so,
    and no memory is taken for what others need. Raises a PacelineError named by the failure.
    """

    def __init__(self, communicator, device, lanes=0, piece_bytes=0, nccl=None, pinned=0, only_prompt=False):
        self._library = load()
        self._handle = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.communicator = communicator
        self.device = device
        options = CudaOptions(
            device=device,
            lanes=lanes,
            piece_bytes=piece_bytes,
            nccl_library=nccl.encode() if nccl else None,
            pinned_bytes=pinned,
            only_prompt=only_prompt,
        )
        handle = c_void_p()
        code = self._library.paceline_cuda_create(communicator._open_handle(), byref(options), byref(handle))
        if code:
            raise from_code(code, core._text(self._library.paceline_cuda_error(None)))
        self._handle = handle
        self._all_reduce = self._library.paceline_cuda_all_reduce
        communicator.before_close(self._destroy)

    @property
    def rank(self):
        return self.communicator.rank

    @property
    def size(self):
        return self.communicator.size

    @property
    def closed(self):
        return self._handle is None or self.communicator.closed

    # --- operations -----------------------------------------------------------------------------------------------

    def reserve(self, size, largest):
        """Memory for buffers of together `size` bytes a step, the largest of `largest`; nothing may be under way."""
        self._check(self._library.paceline_cuda_reserve(self._open(), size, largest))

    def all_reduce(self, pointer, count, dtype, stream, **arguments):
        """Enqueues the reduction in place of `count` elements at `pointer`, after what `stream` holds by now.

        Returns the operation at once; the data may be used again on a stream that has passed :meth:`join`.
        arguments: :meth:`prepare`'s.
        """
        return self.submit(self.prepare(pointer, count, dtype, **arguments), stream)

    def prepare(
        self,
        pointer,
        count,
        dtype,
        reduce_op=core.AVERAGE,
        codec=CODEC_SETTINGS,
        ratio=0.0,
        momentum=0.0,
        segments=None,
        name=b"",
        factor=1.0,
        row_elements=0,
        prompt=False,
    ):
        """The arguments of :meth:`all_reduce` but the stream, laid out once for any number of :meth:`submit`.

        segments: an array made by communicator.segment_array(); name: bytes, for messages; factor: multiplied into
        every rank's values; row_elements: not 0 where the buffer has rows of so many elements and few of them are not
        zero: only those travel, while that takes fewer bytes; prompt: the caller waits for the result, so pieces are
        shorter, the same on all ranks.
        """
        args = CudaArgs(
            data=pointer,
            count=count,
            dtype=dtype,
            reduce_op=reduce_op,
            codec=codec,
            ratio=ratio,
            momentum=momentum,
            name=name,
            factor=factor,
            row_elements=row_elements,
            prompt=prompt,
        )
        if segments is not None:
            args.segments = segments
            args.segment_count = len(segments)
        return core.Prepared(args)

    def submit(self, prepared, stream):
        """:meth:`all_reduce` of what :meth:`prepare` has returned."""
        handle = self._handle
        if handle is None:
            self._open()  # raises
        prepared.arguments.stream = stream
        code = self._all_reduce(handle, prepared.reference, prepared.operation_reference)
        if code:
            self._check(code)
        return prepared.operation.value

    def collective(self, arguments):
        """Enqueues a reduce-scatter, all-gather or broadcast: :class:`CudaCollectiveArgs`. Returns the operation."""
        op = c_uint64()
        self._check(self._library.paceline_cuda_collective(self._open(), byref(arguments), byref(op)))
        return op.value

    def scratch(self, arguments):
        """Bytes of device memory that such a call needs beside its buffers."""
        size = c_uint64()
        self._check(self._library.paceline_cuda_scratch(self._open(), byref(arguments), byref(size)))
        return size.value

    def join(self, op, stream):
        """`stream` waits, on the device, for the operation and all before it."""
        self._check(self._library.paceline_cuda_join(self._open(), op, stream))

    def wait_arrival(self, timeout=0.0):
        """Blocks the host until everything submitted has come over the network; raises what failed.

        Returns False when any rank saw an Inf or NaN. timeout: seconds; 0 is without a limit of its own, for operations
        have deadlines.
        """
        finite = c_int32(1)
        self._check(self._library.paceline_cuda_wait_arrival(self._open(), timeout, byref(finite)))
        return bool(finite.value)

    def wait_operation(self, op, timeout=0.0):
        """wait_arrival() for `op` and all that was submitted before it."""
        finite = c_int32(1)
        self._check(self._library.paceline_cuda_wait_operation(self._open(), op, timeout, byref(finite)))
        return bool(finite.value)

    def take_not_finite(self):
        """The operations of which such waits have said that they were not finite; they are forgotten with that."""
        some, found = (c_uint64 * 64)(), []
        while count := self._library.paceline_cuda_not_finite(self._open(), some, len(some)):
            found += some[:count]
        return found

    def gate(self):
        """The address of a float32 on the device: 1 where a fault comes before all submitted so far has arrived."""
        address = c_uint64()
        self._check(self._library.paceline_cuda_gate(self._open(), byref(address)))
        return address.value

    def rest(self):
        """Sleeps while what a stream was given behind the last join will wait for the network for long; see cuda.h.

        Raises what failed.
        """
        self._check(self._library.paceline_cuda_rest(self._open()))

    def arrived(self, op):
        """Whether wait_operation() would return at once, or raise."""
        return bool(self._library.paceline_cuda_arrived(self._open(), op))

    # --- residuals ------------------------------------------------------------------------------------------------

    def commit_residuals(self, keys=None):
        """See Communicator."""
        self._check(self._library.paceline_cuda_residual_commit(self._open(), *core.key_array(keys)))

    def rollback_residuals(self, keys=None):
        self._check(self._library.paceline_cuda_residual_rollback(self._open(), *core.key_array(keys)))

    def scale_residuals(self, factor, keys=None):
        self._check(self._library.paceline_cuda_residual_scale(self._open(), factor, *core.key_array(keys)))

    def read_residual(self, key, pointer, elements):
        """Copies a parameter's residual (float32) to host memory; elements never seen read as 0."""
        data = ctypes.cast(pointer, POINTER(c_float))
        self._check(self._library.paceline_cuda_residual_read(self._open(), key, data, elements))

    def write_residual(self, key, pointer, elements):
        data = ctypes.cast(pointer, POINTER(c_float))
        self._check(self._library.paceline_cuda_residual_write(self._open(), key, data, elements))

    def read_velocity(self, key, pointer, elements):
        """The same of momentum-corrected top-k's velocity; 0 where there is none."""
        data = ctypes.cast(pointer, POINTER(c_float))
        self._check(self._library.paceline_cuda_velocity_read(self._open(), key, data, elements))

    def write_velocity(self, key, pointer, elements):
        data = ctypes.cast(pointer, POINTER(c_float))
        self._check(self._library.paceline_cuda_velocity_write(self._open(), key, data, elements))

    # --- life -----------------------------------------------------------------------------------------------------

    def describe(self):
        """The path, for the start-up line."""
        return core._text(self._library.paceline_cuda_describe(self._open()))

    def stats(self):
        """Counters as a dict: operations, wire_bytes (without headers), device, pinned and residual memory, rows; what
        a pass takes whose end waits for the GPU, or does not; operations with saturated numbers (see cuda.h)."""
        raw = CudaStats()
        self._check(self._library.paceline_cuda_stats_get(self._open(), byref(raw)))
        return {name: getattr(raw, name) for name, _ in raw._fields_ if name != "struct_size"}

    def abort(self, reason):
        """Ends everything, here and on all ranks, with `reason`; streams that wait are released."""
        with self._lock:  # nobody frees what this is about: to abort NCCL takes a while
            if self._handle is not None and self._pid == os.getpid():
                self._library.paceline_cuda_abort(self._handle, reason.encode())

    def close(self):
        """Orderly end of this handle and of its communicator; all ranks call it."""
        self.communicator.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _destroy(self):
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None and self._pid == os.getpid():
            self._library.paceline_cuda_destroy(handle)

    def _open(self):
        if self._handle is None or self._pid != os.getpid():
            raise UnsupportedError("this communicator is closed; create a new one")
        return self._handle

    def _check(self, code):
        if code:
            raise from_code(code, core._text(self._library.paceline_cuda_error(self._handle)))


__all__ = ["CudaCommunicator", "PacelineError", "load", "missing"]
