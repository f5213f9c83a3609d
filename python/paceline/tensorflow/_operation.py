"""The operation PacelineQueueAllreduce: loading its library, calling it in eager code and in graphs, its gradient."""

import contextlib
import ctypes
import os
import re
import threading
import uuid
from ctypes import c_char_p, c_double, c_int, c_void_p

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library
from tensorflow.python.ops import control_flow_v2_func_graphs

from paceline import _library
from paceline.communicator import AVERAGE, SUM
from paceline.errors import LibraryNotFoundError, PacelineError, UnsupportedError, from_code
from paceline.tensorflow._interrupts import Interrupts

# Graphs of their own that are part of the function around them.
_PARTS = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
)
_DERIVED = re.compile(r"^(__(?:backward|forward|inference)_.*)_\d+$")

_NAME = "libpaceline_tensorflow.so"
_OP = "PacelineQueueAllreduce"

_lock = threading.Lock()
_loaded = None
_interrupts = contextlib.nullcontext()


def _path():
    """Beside the libpaceline.so that is in use; else where that one would be looked for."""
    tried = [os.path.join(os.path.dirname(path), _NAME) for path in _library.candidates()]
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
            library.paceline_tensorflow_attach.argtypes = [c_void_p, c_double, c_int]
            library.paceline_tensorflow_detach.restype = None
            _loaded = library
        return _loaded


def register():
    """Makes the operation known to the TensorFlow of this process."""
    failure = _open().paceline_tensorflow_register()
    if failure:
        raise UnsupportedError(f"TensorFlow {tf.__version__}: {failure.decode()}")


def attach(communicator, timeout, keeps_residuals):
    """timeout: seconds that an all-reduce waits for ranks that have not reached it. keeps_residuals: whether the
    settings' codec does."""
    global _interrupts
    library = _open()
    code = library.paceline_tensorflow_attach(communicator._handle, timeout, keeps_residuals)
    if code:
        raise from_code(code, library.paceline_tensorflow_error().decode())
    _interrupts = Interrupts(lambda: communicator.abort(f"rank {communicator.rank} was interrupted (SIGINT)"))


def detach():
    global _interrupts
    _open().paceline_tensorflow_detach()
    _interrupts, last = contextlib.nullcontext(), _interrupts
    if isinstance(last, Interrupts):
        last.close()


def allreduce(tensor, op, name, named=True):
    """named: the user chose the name, directly or for what this is the gradient of."""
    tensor = tf.convert_to_tensor(tensor)
    if op == AVERAGE and not tensor.dtype.is_floating:
        raise PacelineError(f"the average of {tensor.dtype.name} is not an integer: use Sum, or cast first")
    named = named and bool(name)
    if tf.executing_eagerly():
        # Names stay few, since TensorFlow keeps a kernel per name: calls of one kind share theirs and are matched in
        # order.
        return _eager(tensor, op, name or f"eager.{tensor.dtype.name}.{tensor.shape}.{op}", named)
    return _graph(tensor, op, name, named)


def _function_of(graph):
    """The graph of the function, or of the session, that holds `graph`: branches and bodies of loops, which have
    graphs of their own, are part of it. What TensorFlow calls those depends on what else the process has built."""
    while isinstance(graph, _PARTS):
        graph = graph.outer_graph
    return graph


def _kept(graph, attribute, make):
    if not hasattr(graph, attribute):
        setattr(graph, attribute, make())
    return getattr(graph, attribute)


def _name_in(graph, name):
    """Unnamed operations by number, and names that come again with theirs, in the order of tracing: so that a function
    traced twice has the same names, and no two operations of one have the same."""
    graph = _function_of(graph)
    taken = _kept(graph, "_paceline_names", dict)
    if name:
        number = taken[name] = taken.get(name, -1) + 1
        return f"{name}#{number}" if number else name
    number = taken[None] = taken.get(None, -1) + 1
    # The uid in the name of a function that TensorFlow has made of another one differs between ranks.
    function = _DERIVED.sub(r"\1", getattr(graph, "name", "session"))
    return f"{function}.{number}"


def _eager(tensor, op, name, named):
    attributes = ("T", tensor.dtype.as_datatype_enum, "tensor_name", name, "reduce_op", op, "named", named)
    attributes += ("trace", "", "traced_as", "")
    with _interrupts:
        outputs = execute.execute(_OP.encode(), 1, inputs=[tensor], attrs=attributes, ctx=context.context())
    if execute.must_record_gradient():
        execute.record_gradient(_OP, [tensor], attributes, outputs)
    return outputs[0]


def _graph(tensor, op, name, named):
    """As TensorFlow's generated wrappers do: a tape inside the function learns of it only when it is told."""
    graph = tf.compat.v1.get_default_graph()
    with tf.name_scope(_OP) as scope:
        values = {
            "tensor_name": _name_in(graph, name),
            "reduce_op": op,
            "named": named,
            "trace": _kept(graph, "_paceline_trace", lambda: uuid.uuid4().hex),
            "traced_as": scope.rstrip("/"),
        }
        # A name that ends with a slash is taken as it is.
        _, _, node, outputs = op_def_library._apply_op_helper(_OP, name=scope, tensor=tensor, **values)
    if execute.must_record_gradient():
        attributes = ("T", node._get_attr_type("T"), *(item for pair in values.items() for item in pair))
        execute.record_gradient(_OP, node.inputs, attributes, outputs)
    return outputs[0]


@tf.RegisterGradient(_OP)
def _gradient(op, gradient):
    """d(sum over ranks)/dx: every rank's output depends on this rank's input alike, so the gradients are summed."""
    reduce_op = op.get_attr("reduce_op")
    if reduce_op not in (SUM, AVERAGE):
        raise LookupError("Paceline's all-reduce has a gradient for Sum and Average only")
    name = op.get_attr("tensor_name")
    name = name.decode() if isinstance(name, bytes) else name
    return allreduce(gradient, reduce_op, f"{name}.gradient", named=op.get_attr("named"))
