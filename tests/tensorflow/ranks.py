"""One rank of the tests in this folder: `ranks.py DIRECTORY RANK SIZE CASE…` runs the named cases and leaves
DIRECTORY/RANK.json: {case: "ok" or a traceback}. All ranks run the same cases in the same order, with one inter-op
thread, so that an all-reduce that blocked a thread of TensorFlow's would be found out.
"""

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import paceline.tensorflow as pl

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Store:
    """Keys are files; a rename makes a value appear whole."""

    def __init__(self, directory):
        self._directory = Path(directory)

    def _path(self, key):
        return self._directory / ("key-" + key.encode().hex())

    def put(self, key, value):
        draft = self._path(key).with_suffix(f".{os.getpid()}")
        draft.write_bytes(value)
        draft.rename(self._path(key))

    def get(self, key):
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None


def inputs(shape, dtype, seed):
    """Every rank's input: [ranks, *shape], equal on all ranks."""
    generator = np.random.default_rng(seed)
    shape = (pl.size(), *shape)
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if np.issubdtype(np.dtype(dtype), np.integer):
        return generator.integers(0, 50, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


@case
def eager_dtypes():
    for seed, dtype in enumerate(["float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool"]):
        for shape in [(), (1,), (7, 3), (0, 4), (50_001,)]:
            everyone = inputs(shape, dtype, seed)
            got = pl.allreduce(tf.constant(everyone[pl.rank()]), op=pl.Sum)
            assert got.dtype.name == dtype
            assert got.shape == shape
            if dtype == "bool":
                expected = everyone.any(axis=0)
            else:
                expected = everyone.sum(axis=0, dtype=np.float64 if got.dtype.is_floating else everyone.dtype)
            tolerance = {"float16": 4e-3, "float32": 1e-6, "float64": 1e-14}.get(dtype, 0)
            np.testing.assert_allclose(
                got.numpy().astype(float), expected.astype(float), rtol=tolerance, atol=tolerance
            )
    everyone = inputs((1000,), "float32", 99)
    got = pl.allreduce(tf.cast(tf.constant(everyone[pl.rank()]), tf.bfloat16), op=pl.Sum)
    assert got.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(got, tf.float32).numpy(), everyone.sum(axis=0), atol=0.1)


@case
def eager_operations():
    everyone = inputs((313,), "float64", 5)
    mine = tf.constant(everyone[pl.rank()])
    for op, expected in [
        (pl.Sum, everyone.sum(axis=0)),
        (pl.Average, everyone.mean(axis=0)),
        (pl.Min, everyone.min(axis=0)),
        (pl.Max, everyone.max(axis=0)),
        (pl.Product, everyone.prod(axis=0)),
    ]:
        np.testing.assert_allclose(pl.allreduce(mine, op=op).numpy(), expected, rtol=1e-14)
    np.testing.assert_array_equal(mine.numpy(), everyone[pl.rank()])  # the input stays as it was


@case
def function_runs_many_times():
    @tf.function
    def step(x):
        first = pl.allreduce(x, op=pl.Sum, name="a")
        second = pl.allreduce(x * 2.0, op=pl.Average, name="b")
        return first + second

    for i in range(20):
        everyone = inputs((257,), "float32", i)
        got = step(tf.constant(everyone[pl.rank()])).numpy()
        np.testing.assert_allclose(got, everyone.sum(0) + 2 * everyone.mean(0), rtol=1e-5, atol=1e-5)


@case
def function_with_equal_inputs_keeps_both():
    """Two call sites with one input are two operations, not one that the optimizer merged."""

    @tf.function
    def step(x):
        return pl.allreduce(x, op=pl.Sum) - pl.allreduce(x, op=pl.Sum) + pl.allreduce(x, op=pl.Max)

    everyone = inputs((31,), "float64", 1)
    np.testing.assert_allclose(step(tf.constant(everyone[pl.rank()])).numpy(), everyone.max(0))


@case
def function_with_unknown_shape():
    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    def step(x):
        y = pl.allreduce(x, op=pl.Sum, name="unknown")
        assert y.shape.as_list() == [None, 3]
        return y

    for rows in (1, 5, 2):
        everyone = inputs((rows, 3), "float32", rows)
        np.testing.assert_allclose(step(tf.constant(everyone[pl.rank()])).numpy(), everyone.sum(0), rtol=1e-6)


@case
def two_orders_do_not_deadlock():
    """Rank 0 makes `a` ready long before `b`, rank 1 the other way round; a single inter-op thread serves both."""
    names = ("a", "b") if pl.rank() == 0 else ("b", "a")

    @tf.function
    def step(x):
        results = {}
        for name, value in zip(names, (x, late(x)), strict=True):
            results[name] = pl.allreduce(value + (1.0 if name == "b" else 0.0), op=pl.Sum, name=f"order.{name}")
        return results["a"], results["b"]

    for i in range(10):
        everyone = inputs((1000,), "float32", 40 + i)
        a, b = step(tf.constant(everyone[pl.rank()]))
        np.testing.assert_allclose(a.numpy(), everyone.sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(b.numpy(), everyone.sum(0) + pl.size(), rtol=1e-5, atol=1e-5)


@case
def many_orders_do_not_deadlock():
    order = np.random.default_rng(pl.rank()).permutation(60)

    @tf.function
    def step(x):
        results = [None] * len(order)
        for k in order:
            results[k] = pl.allreduce(x * float(k), op=pl.Sum, name=f"many.{k}")
        return results

    everyone = inputs((77,), "float64", 3)
    for _ in range(3):
        for k, got in enumerate(step(tf.constant(everyone[pl.rank()]))):
            np.testing.assert_allclose(got.numpy(), everyone.sum(0) * k, rtol=1e-12, atol=1e-12)


@case
def orders_of_threads_do_not_matter():
    """Eager calls from two threads, in opposite orders on the ranks: each blocks its own thread only."""
    everyone = inputs((10,), "float64", 8)
    mine = tf.constant(everyone[pl.rank()])
    results = {}

    def call(name):
        results[name] = pl.allreduce(mine, op=pl.Sum, name=name).numpy()

    names = ["t.0", "t.1", "t.2"]
    threads = [threading.Thread(target=call, args=(n,)) for n in (names if pl.rank() == 0 else names[::-1])]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(60)
    for name in names:
        np.testing.assert_allclose(results[name], everyone.sum(0))


@case
def gradient_in_eager_code_and_functions():
    everyone = inputs((9,), "float64", 12)
    weights = inputs((9,), "float64", 13)

    def loss(x, op, name):
        return tf.reduce_sum(pl.allreduce(x, op=op, name=name) * tf.constant(weights[pl.rank()]))

    for op, expected in [(pl.Sum, weights.sum(0)), (pl.Average, weights.mean(0))]:
        for how in (loss, tf.function(loss)):
            x = tf.Variable(everyone[pl.rank()])
            with tf.GradientTape() as tape:
                value = how(x, op, f"gradient.{op}.{type(how).__name__}")
            np.testing.assert_allclose(tape.gradient(value, x).numpy(), expected, rtol=1e-12)


@case
def gradient_of_a_tape_inside_a_function():
    """The loss has a second way to x, which alone would give a gradient without an error."""
    everyone = inputs((9,), "float64", 14)
    weights = inputs((9,), "float64", 15)

    def slope(x, op, name):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = pl.allreduce(x, op=op, name=name)
            loss = tf.reduce_sum(y * tf.constant(weights[pl.rank()])) + tf.reduce_sum(x)
        return tape.gradient(loss, x)

    for op, expected in [(pl.Sum, weights.sum(0)), (pl.Average, weights.mean(0))]:
        for how in (slope, tf.function(slope)):
            got = how(tf.constant(everyone[pl.rank()]), op, f"inner gradient.{op}.{type(how).__name__}")
            np.testing.assert_allclose(got.numpy(), expected + 1, rtol=1e-12)


@case
def gradient_of_max_is_a_clear_error():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = pl.allreduce(x, op=pl.Max, name="no gradient")
    try:
        tape.gradient(y, x)
    except LookupError as error:
        assert "Sum and Average" in str(error)
    else:
        raise AssertionError("no error")


def late(value, source=None):
    """value, ready a while later. source: what is no constant, where value is one.

    The optimizer folds constants and drops what only control dependencies need; that this minimum is 0 it can't know.
    """
    square = tf.fill([300, 300], tf.reduce_sum(value if source is None else source))
    return value + tf.cast(tf.minimum(tf.abs(tf.reduce_sum(tf.linalg.matmul(square, square))), 0), value.dtype)


@case
def late_values_are_late():
    """The optimizer has left the work in."""
    for how in (tf.function(lambda x: late(x)), tf.function(lambda x: late(tf.ones([]), x))):
        context.enable_run_metadata()
        how(tf.fill([4], 3.0))
        left = [n.op for graph in context.export_run_metadata().partition_graphs for n in graph.node]
        assert any("MatMul" in op for op in left), left
    context.disable_run_metadata()


@case
def a_function_called_at_many_places():
    """One traced all-reduce, unnamed, for every gradient; each rank has them ready in an order of its own."""

    @tf.function
    def average(x):
        return pl.allreduce(x)

    order = np.random.default_rng(100 + pl.rank()).permutation(12)
    everyone = inputs((12, 64), "float32", 41)

    @tf.function
    def step(x):
        values = [x * 0.0 + everyone[pl.rank()][i] for i in range(12)]
        waits = [late(x) * 0.0 for _ in range(2)]
        for place, i in enumerate(order):
            if place >= 6:
                values[i] += waits[place % 2]
        return tf.stack([average(value) for value in values])

    exact = everyone.astype(np.float64).mean(0)
    for _ in range(20):
        np.testing.assert_allclose(step(tf.ones([64])).numpy(), exact, rtol=1e-5, atol=1e-6)


@case
def two_functions_of_one_name_are_refused_in_one_step():
    """Nothing tells them apart for the other ranks: an error on all, not a sum of the one and the other."""
    plus = tf.function(lambda x: pl.allreduce(x))
    minus = tf.function(lambda x: pl.allreduce(-x))

    @tf.function
    def step(a, b):
        if pl.rank() == 0:
            a = late(a)
        else:
            b = late(b)
        return plus(a), minus(b)

    try:
        step(tf.fill([4], 1.0), tf.fill([4], 10.0))
    except tf.errors.InvalidArgumentError as error:
        assert "one step" in str(error) and "name=" in str(error), error
    else:
        raise AssertionError("no error")
    np.testing.assert_array_equal(plus(tf.fill([4], 1.0)).numpy(), np.full(4, 1.0))
    np.testing.assert_array_equal(minus(tf.fill([4], 10.0)).numpy(), np.full(4, -10.0))


@case
def names_that_come_again_in_a_function():
    """A name twice in one function: the first belongs to the first, whichever is ready first."""

    @tf.function
    def step(x):
        first, second = (late(x), x) if pl.rank() == 0 else (x, late(x))
        return pl.allreduce(first, name="again"), pl.allreduce(second * 10.0, name="again")

    everyone = inputs((40,), "float32", 42)
    exact = everyone.astype(np.float64).mean(0)
    for _ in range(5):
        first, second = step(tf.constant(everyone[pl.rank()]))
        np.testing.assert_allclose(first.numpy(), exact, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(second.numpy(), exact * 10, rtol=1e-5, atol=1e-5)


@case
def two_gradients_through_one_operation():
    small_weights, large_weights = inputs((64,), "float32", 43), inputs((64,), "float32", 44) * 100

    @tf.function
    def slopes(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = pl.allreduce(x, op=pl.Sum, name="twice")
            a, b = (tf.reduce_sum(y * weights[pl.rank()]) for weights in (small_weights, large_weights))
        # Each rank has the other one ready first.
        seeds = [late(tf.ones([]), x), tf.ones([])] if pl.rank() == 0 else [tf.ones([]), late(tf.ones([]), x)]
        return [tape.gradient(value, x, output_gradients=seed) for value, seed in zip((a, b), seeds, strict=True)]

    for _ in range(10):
        small, large = slopes(tf.ones([64]))
        for slope, weights in ((small, small_weights), (large, large_weights)):
            np.testing.assert_allclose(slope.numpy(), weights.astype(np.float64).sum(0), rtol=1e-5, atol=1e-4)


@case
def loops_match_their_iterations():
    """map_fn runs iterations at once, in any order; one loop in another runs them again and again."""

    def element(number, x):
        x = tf.cond(tf.equal(number % 2, pl.rank()), lambda: late(x), lambda: x)
        return pl.allreduce(x, op=pl.Sum, name="element")

    @tf.function
    def mapped(x):
        return tf.map_fn(lambda pair: element(*pair), (tf.range(20), x), fn_output_signature=tf.float64)

    @tf.function
    def nested(x):
        return tf.map_fn(lambda row: tf.map_fn(lambda e: pl.allreduce(e, op=pl.Sum), row), x, parallel_iterations=1)

    x = np.arange(20.0).reshape(4, 5)
    for _ in range(10):
        np.testing.assert_array_equal(mapped(tf.constant(x.reshape(20, 1))).numpy(), 2 * x.reshape(20, 1))
        np.testing.assert_array_equal(nested(tf.constant(x)).numpy(), 2 * x)


@case
def unnamed_operations_do_not_count_what_else_was_built():
    """TensorFlow numbers the graphs of loops, branches and backward functions through the whole process."""
    if pl.rank() == 0:
        for _ in range(3):
            tf.function(lambda v: tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a * 2), [0, v])[1])(1.0)

    @tf.function
    def step(x):
        x = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, pl.allreduce(a, op=pl.Sum)), [0, x])[1]
        return tf.cond(x[0] > 0, lambda: pl.allreduce(x, op=pl.Sum), lambda: x)

    everyone = np.abs(inputs((40,), "float32", 45)) + 1  # above 0: all ranks go one way
    exact = everyone.astype(np.float64).sum(0)
    result = step(tf.constant(everyone[pl.rank()])).numpy()
    np.testing.assert_allclose(result, exact * pl.size() ** 3, rtol=1e-5)

    @tf.custom_gradient
    def reduced_gradient(x):
        return tf.identity(x), lambda slope: pl.allreduce(slope, op=pl.Sum)

    x = tf.ones([4])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(reduced_gradient)(x)
    slope = tape.gradient(y, x, output_gradients=tf.constant(everyone[pl.rank()][:4]))
    np.testing.assert_allclose(slope.numpy(), exact[:4], rtol=1e-5)


@case
def unnamed_operations_keep_no_residual():
    """With top-k from the settings: what one unnamed all-reduce left out is not added to another's sum."""
    large = tf.constant(np.linspace(0.5, 1.5, 1 << 18, dtype=np.float32))
    exact = large.numpy() * pl.size()
    calls = {
        "eager": lambda x, name=None: pl.allreduce(x, op=pl.Sum, name=name),
        "function": tf.function(lambda x, name=None: pl.allreduce(x, op=pl.Sum, name=name)),
        "loop": tf.function(lambda x: tf.map_fn(lambda e: pl.allreduce(e, op=pl.Sum, name="in a loop"), x[None])[0]),
    }
    for how in calls.values():
        np.testing.assert_array_equal(how(large).numpy(), exact)
        np.testing.assert_array_equal(how(tf.zeros_like(large)).numpy(), np.zeros_like(exact))
    for kind in ("eager", "function"):
        sent = calls[kind](large, name=f"parameter.{kind}").numpy()
        assert 0 < np.count_nonzero(sent) < exact.size // 2  # top-k, as the settings say
        sent = calls[kind](tf.zeros_like(large), name=f"parameter.{kind}").numpy()
        assert np.count_nonzero(sent) > 0  # what was left out before


@case
def fp16_sends_half_of_the_bytes():
    """With fp16 from the settings, of two ranks: each gives its float32 away once, in half of its bytes."""
    everyone = inputs((1 << 20,), "float32", 46)

    def total(x):
        return pl.allreduce(x, op=pl.Sum, name="halved")

    for how in (total, tf.function(total)):
        for dtype, share in (("float32", 1 / 2), ("float64", 1)):
            mine = tf.constant(everyone[pl.rank()].astype(dtype))
            before = pl._communicator.stats()["wire_sent"]
            got = how(mine).numpy()
            sent = (pl._communicator.stats()["wire_sent"] - before) / everyone[0].astype(dtype).nbytes
            assert share <= sent < 1.01 * share, (dtype, sent)
            exact = everyone.astype(dtype).sum(0)
            if share == 1:
                np.testing.assert_array_equal(got, exact)
            else:
                assert (got != exact).any()
                np.testing.assert_allclose(got, exact, rtol=2**-10, atol=2**-9)  # two roundings to 11 bits


@case
def session_of_version_one():
    everyone = inputs((4, 5), "float32", 21)
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, 5])
        total = pl.allreduce(x, op=pl.Sum, name="session")
        slope = tf.gradients(total, x)[0]
        with tf.compat.v1.Session() as session:
            for i in range(5):
                got, got_slope = session.run([total, slope], {x: everyone[pl.rank()] * (i + 1)})
                np.testing.assert_allclose(got, everyone.sum(0) * (i + 1), rtol=1e-5)
                np.testing.assert_allclose(got_slope, np.full((4, 5), pl.size()), rtol=1e-6)


@case
def constant_inputs_stay_in_step():
    """One rank's input is a constant of the graph, the other's is not: both run the operation every time."""

    @tf.function
    def step(x):
        value = tf.constant([3.0, 4.0]) if pl.rank() == 0 else x
        return pl.allreduce(value, op=pl.Sum, name="constant")

    for i in range(4):
        got = step(tf.constant([float(i), 1.0])).numpy()
        others = pl.size() - 1
        np.testing.assert_allclose(got, [3.0 + i * others, 4.0 + others])


@case
def training_step_by_gradients():
    """Data-parallel SGD equals the same step on the whole batch."""
    generator = np.random.default_rng(0)
    data = generator.standard_normal((pl.size() * 8, 6))
    target = generator.standard_normal((pl.size() * 8, 1))
    weights = tf.Variable(generator.standard_normal((6, 1)))
    reference = weights.numpy().copy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        weights.assign_sub(0.1 * pl.allreduce(tape.gradient(loss, weights), op=pl.Average, name="sgd"))

    mine = slice(pl.rank() * 8, pl.rank() * 8 + 8)
    for _ in range(10):
        step(tf.constant(data[mine]), tf.constant(target[mine]))
        reference -= 0.1 * 2 * data.T @ (data @ reference - target) / len(data)
    np.testing.assert_allclose(weights.numpy(), reference, rtol=1e-10)


@case
def differing_shapes_raise_on_all_ranks_and_the_job_goes_on():
    mine = tf.ones([2, 3]) if pl.rank() == 0 else tf.ones([3, 2])
    for how in (pl.allreduce, tf.function(lambda x, name: pl.allreduce(x, name=name))):
        try:
            how(mine, name="shapes")
        except tf.errors.InvalidArgumentError as error:
            assert "[2, 3]" in str(error) and "[3, 2]" in str(error) and "shapes" in str(error), error
        else:
            raise AssertionError("no error")
    for mine, name, words in [
        (tf.ones([4], tf.float32 if pl.rank() == 0 else tf.float64), "dtypes", ("float32 [4]", "float64 [4]")),
        (tf.ones([4]), "operations", ("sum", "min")),
    ]:
        op = pl.Min if name == "operations" and pl.rank() == 1 else pl.Sum
        try:
            pl.allreduce(mine, op=op, name=name)
        except tf.errors.InvalidArgumentError as error:
            assert all(word in str(error) for word in (name, *words)), error
        else:
            raise AssertionError(f"no error for {name}")
    np.testing.assert_allclose(pl.allreduce(tf.ones([4]), op=pl.Sum, name="after").numpy(), np.full(4, pl.size()))


@case
def wrong_arguments_are_named():
    for arguments, text in [((tf.ones([2], tf.int32), pl.Average), "average"), ((tf.ones([2]), 17), "17")]:
        try:
            pl.allreduce(*arguments)
        except pl._operation.PacelineError as error:
            assert text in str(error)
        else:
            raise AssertionError("no error")
    try:
        pl.allreduce(tf.constant("text"), op=pl.Sum)
    except (TypeError, ValueError, tf.errors.OpError):
        pass
    else:
        raise AssertionError("no error for a string")


@case
def shut_down_and_again():
    pl.shutdown()
    assert not pl.is_initialized()
    try:
        pl.rank()
    except pl._operation.PacelineError as error:
        assert "init()" in str(error)
    else:
        raise AssertionError("no error")
    start("again")
    np.testing.assert_allclose(pl.allreduce(tf.ones([4]), op=pl.Sum).numpy(), np.full(4, pl.size()))


def meet(name):
    """Waits for the other ranks without Paceline."""
    store = Store(sys.argv[1])
    store.put(f"{name}.{pl.rank()}", b"")
    while any(store.get(f"{name}.{rank}") is None for rank in range(pl.size())):
        time.sleep(0.01)


def start(generation):
    directory, rank, size = Path(sys.argv[1]) / generation, int(sys.argv[2]), int(sys.argv[3])
    directory.mkdir(exist_ok=True)
    timeout = 0 if "PACELINE_TIMEOUT" in os.environ else 60
    pl.init(rank=rank, size=size, store=Store(directory), timeout=timeout)


def main():
    directory, rank = Path(sys.argv[1]), sys.argv[2]
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    start("first")
    results = {}
    for name in sys.argv[4:]:
        try:
            CASES[name]()
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
        (directory / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
