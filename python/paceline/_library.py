"""Finds libpaceline.so and declares the prototypes of include/paceline/comm.h.

Looked for, in this order: the file that $PACELINE_LIBRARY names; beside this package (where the wheel puts it);
build/lib of the source tree that this package lies in.
"""

import ctypes
import os
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_long,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

from paceline.errors import LibraryNotFoundError

ABI_VERSION = 2
_NAME = "libpaceline.so"

StorePut = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)
StoreGet = CFUNCTYPE(c_long, c_void_p, c_char_p, c_void_p, c_size_t)


class _Sized(Structure):
    """A struct of the C ABI that begins with its own size."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Store(_Sized):
    _fields_ = [("struct_size", c_size_t), ("context", c_void_p), ("put", StorePut), ("get", StoreGet)]


class CommOptions(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("store_prefix", c_char_p),
        ("store", POINTER(Store)),
        ("face", c_char_p),
        ("timeout_s", c_double),
        ("job_rank", POINTER(c_int32)),
        ("operation_timeout_s", c_double),
    ]


class Identity(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("local_rank", c_int32),
        ("local_size", c_int32),
        ("node", c_int32),
        ("node_count", c_int32),
    ]


class Segment(Structure):
    _fields_ = [("key", c_uint64), ("offset", c_uint64), ("elements", c_uint64)]


class OpArgs(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("collective", c_int32),
        ("dtype", c_int32),
        ("reduce_op", c_int32),
        ("root", c_int32),
        ("group", c_uint32),
        ("algorithm", c_int32),
        ("codec", c_int32),
        ("fp16_values", c_int32),
        ("ratio", c_double),
        ("input", c_void_p),
        ("output", c_void_p),
        ("count", c_uint64),
        ("counts", POINTER(c_uint64)),
        ("send_counts", POINTER(c_uint64)),
        ("receive_counts", POINTER(c_uint64)),
        ("segments", POINTER(Segment)),
        ("segment_count", c_size_t),
        ("name", c_char_p),
        ("shape", c_char_p),
        ("timeout_s", c_double),
        ("window_bytes", c_uint64),
        ("notify", c_void_p),
        ("context", c_void_p),
    ]


class TransferArgs(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("group", c_uint32),
        ("peer", c_int32),
        ("tag", c_uint32),
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("name", c_char_p),
        ("timeout_s", c_double),
        ("any_length", c_int32),
        ("notify", c_void_p),
        ("context", c_void_p),
        ("shape", c_char_p),
    ]


class Result(_Sized):
    _fields_ = [("struct_size", c_size_t), ("op", c_uint64), ("code", c_int32), ("finite", c_int32)]


class Stats(_Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("operations", c_uint64),
        ("payload_sent", c_uint64),
        ("payload_received", c_uint64),
        ("wire_sent", c_uint64),
        ("wire_received", c_uint64),
        ("predicted_link_bytes", c_uint64),
        ("plans_built", c_uint64),
        ("plans_reused", c_uint64),
        ("scratch_bytes", c_uint64),
        ("residual_bytes", c_uint64),
    ]


_CODE = c_int
_COMM = c_void_p
_OP = c_uint64
_PROTOTYPES = {
    "paceline_abi_version": (c_uint32, []),
    "paceline_version": (c_char_p, []),
    "paceline_code_name": (c_char_p, [_CODE]),
    "paceline_comm_create": (_CODE, [POINTER(CommOptions), POINTER(_COMM)]),
    "paceline_comm_destroy": (_CODE, [_COMM]),
    "paceline_comm_abort": (_CODE, [_COMM, c_char_p]),
    "paceline_comm_health": (_CODE, [_COMM]),
    "paceline_comm_identity": (_CODE, [_COMM, POINTER(Identity)]),
    "paceline_comm_describe": (c_char_p, [_COMM]),
    "paceline_error": (c_char_p, [_COMM]),
    "paceline_comm_stats": (_CODE, [_COMM, POINTER(Stats)]),
    "paceline_group_create": (_CODE, [_COMM, POINTER(c_int32), c_size_t, POINTER(c_uint32)]),
    "paceline_group_destroy": (_CODE, [_COMM, c_uint32]),
    "paceline_submit": (_CODE, [_COMM, POINTER(OpArgs), POINTER(_OP)]),
    "paceline_send": (_CODE, [_COMM, POINTER(TransferArgs), POINTER(_OP)]),
    "paceline_receive": (_CODE, [_COMM, POINTER(TransferArgs), POINTER(_OP)]),
    "paceline_run": (_CODE, [_COMM, POINTER(OpArgs), POINTER(Result)]),
    "paceline_test": (c_int, [_COMM, _OP]),
    "paceline_give_way": (c_int, [_COMM, _OP, c_double]),
    "paceline_wait": (_CODE, [_COMM, _OP, c_double, POINTER(Result)]),
    "paceline_wait_any": (c_int, [_COMM, c_double, POINTER(Result), c_int]),
    "paceline_watch": (_CODE, [_COMM, _OP]),
    "paceline_op_error": (c_size_t, [_COMM, _OP, c_char_p, c_size_t]),
    "paceline_trim": (_CODE, [_COMM]),
    "paceline_residual_commit": (_CODE, [_COMM, POINTER(c_uint64), c_uint64]),
    "paceline_residual_rollback": (_CODE, [_COMM, POINTER(c_uint64), c_uint64]),
    "paceline_residual_scale": (_CODE, [_COMM, c_double]),
    "paceline_residual_read": (_CODE, [_COMM, c_uint64, POINTER(c_float), c_uint64]),
    "paceline_residual_write": (_CODE, [_COMM, c_uint64, POINTER(c_float), c_uint64]),
    "paceline_alloc": (c_void_p, [_COMM, c_size_t]),
    "paceline_free": (None, [_COMM, c_void_p]),
    "paceline_share": (_CODE, [_COMM, c_void_p, c_size_t]),
    "paceline_unshare": (_CODE, [_COMM, c_void_p]),
    "paceline_settings_json": (c_size_t, [c_char_p, c_char_p, c_size_t]),
    "paceline_settings_check": (_CODE, [c_char_p, c_char_p, c_size_t]),
    "paceline_settings_warn": (_CODE, [c_char_p, c_int32]),
    "paceline_setting": (c_size_t, [c_char_p, c_char_p, c_char_p, c_size_t]),
}

_lock = threading.Lock()
_loaded = None


def candidates():
    """The paths that are tried, in order."""
    named = os.environ.get("PACELINE_LIBRARY")
    if named:
        return [named]
    package = os.path.dirname(os.path.abspath(__file__))
    tree = os.path.dirname(os.path.dirname(package))
    return [
        os.path.join(package, "lib", _NAME),
        os.path.join(package, _NAME),
        os.path.join(tree, "build", "lib", _NAME),
    ]


def _open(path):
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryNotFoundError(f"{path} can't be loaded: {error}") from None
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LibraryNotFoundError(
                f"{path} has no {name}(): it was built from another version than this Python package; build or install "
                "both together"
            ) from None
        function.restype = result
        function.argtypes = arguments
    version = library.paceline_abi_version()
    if version != ABI_VERSION:
        raise LibraryNotFoundError(
            f"{path} has ABI version {version}, this package needs {ABI_VERSION}; install both from one build"
        )
    return library


def load():
    """The library, loaded once per process.

    Raises LibraryNotFoundError with the paths that were tried.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            tried = candidates()
            path = next((p for p in tried if os.path.exists(p)), None)
            if path is None:
                raise LibraryNotFoundError(
                    f"{_NAME} was not found (tried {', '.join(tried)}); install the paceline wheel, build the source "
                    "tree with ./dev build, or set PACELINE_LIBRARY to the file"
                )
            _loaded = _open(path)
        return _loaded


def read_text(function, *arguments):
    """Calls a function that writes text into (char*, size) and returns the length, with a large enough buffer."""
    capacity = 4096
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        length = function(*arguments, buffer, capacity)
        if length < capacity:
            return buffer.raw[:length].decode("utf-8", "replace")
        capacity = length + 1
