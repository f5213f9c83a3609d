"""The operation PacelineQueueAllreduce: loading its library, calling it in eager code and in graphs, its gradient."""

import ctypes
import os
import threading
from ctypes import c_char_p, c_double, c_int, c_void_p

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library

from paceline import _library
from paceline.communicator import AVERAGE, SUM
from paceline.errors import LibraryNotFoundError, PacelineError, UnsupportedError, from_code

_NAME = "libpaceline_tensorflow.so"
_OP = "PacelineQueueAllreduce"

_lock = threading.Lock()
_loaded = None


def _path():
    """Beside the libpaceline.so that is in use; else where that one would be looked for."""
    named = os.environ.get("PACELINE_TENSORFLOW_LIBRARY")
    tried = [named] if named else [os.path.join(os.path.dirname(path), _NAME) for path in _library.candidates()]
    for path in tried:
        if os.path.exists(path):
            return path
    raise LibraryNotFoundError(
        f"{_NAME} was not found (tried {', '.join(tried)}); install the paceline wheel or build the source tree with "
        "./dev build"
    )


def _open():
    global _loaded
    with _lock:
        if _loaded is None:
            _library.load()  # first, so that the adapter binds to this very libpaceline.so
            path = _path()
            try:
                library = ctypes.CDLL(path)
            except OSError as error:
                raise LibraryNotFoundError(f"{path} can't be loaded: {error}") from None
            library.paceline_tensorflow_register.restype = c_char_p
            library.paceline_tensorflow_error.restype = c_char_p
            library.paceline_tensorflow_attach.restype = c_int
            library.paceline_tensorflow_attach.argtypes = [c_void_p, c_double]
            library.paceline_tensorflow_detach.restype = None
            _loaded = library
        return _loaded


def register():
    """Makes the operation known to the TensorFlow of this process."""
    failure = _open().paceline_tensorflow_register()
    if failure:
        raise UnsupportedError(f"TensorFlow {tf.__version__}: {failure.decode()}")


def attach(communicator, timeout):
    """timeout: seconds that an all-reduce waits for ranks that have not reached it."""
    library = _open()
    code = library.paceline_tensorflow_attach(communicator._handle, timeout)
    if code:
        raise from_code(code, library.paceline_tensorflow_error().decode())


def detach():
    _open().paceline_tensorflow_detach()


def allreduce(tensor, op, name):
    tensor = tf.convert_to_tensor(tensor)
    if op == AVERAGE and not tensor.dtype.is_floating:
        raise PacelineError(f"the average of {tensor.dtype.name} is not an integer: use Sum, or cast first")
    if tf.executing_eagerly():
        # Names stay few, since TensorFlow keeps a kernel per name: calls of one kind share theirs and are matched in
        # order.
        return _eager(tensor, op, name or f"eager.{tensor.dtype.name}.{tensor.shape}.{op}")
    return _graph(tensor, op, name or _next_name())


def _next_name():
    """The unnamed operations of a graph by number, so that a graph built twice has the same names."""
    graph = tf.compat.v1.get_default_graph()
    number = getattr(graph, "_paceline_unnamed", 0)
    graph._paceline_unnamed = number + 1
    return f"{getattr(graph, 'name', 'session')}.{number}"


def _eager(tensor, op, name):
    attributes = ("T", tensor.dtype.as_datatype_enum, "tensor_name", name, "reduce_op", op)
    outputs = execute.execute(_OP.encode(), 1, inputs=[tensor], attrs=attributes, ctx=context.context())
    if execute.must_record_gradient():
        execute.record_gradient(_OP, [tensor], attributes, outputs)
    return outputs[0]


def _graph(tensor, op, name):
    """As TensorFlow's generated wrappers do: a tape inside the function learns of the operation only when it is told."""
    _, _, node, outputs = op_def_library._apply_op_helper(_OP, tensor=tensor, tensor_name=name, reduce_op=op)
    if execute.must_record_gradient():
        attributes = ("T", node._get_attr_type("T"), "tensor_name", name, "reduce_op", op)
        execute.record_gradient(_OP, node.inputs, attributes, outputs)
    return outputs[0]


@tf.RegisterGradient(_OP)
def _gradient(op, gradient):
    """d(sum over ranks)/dx: every rank's output depends on this rank's input alike, so the gradients are summed."""
    reduce_op = op.get_attr("reduce_op")
    if reduce_op not in (SUM, AVERAGE):
        raise LookupError("Paceline's all-reduce has a gradient for Sum and Average only")
    name = op.get_attr("tensor_name")
    return allreduce(gradient, reduce_op, f"{name.decode() if isinstance(name, bytes) else name}.gradient")
