"""Ranks that shut down while something else goes on: `endings.py DIRECTORY RANK SIZE CASE…`, as ranks.py is run."""

import os
import signal
import threading
import time

import ranks
from ranks import pl, start, tf

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def shut_down_while_threads_call():
    """What a thread calls at that moment runs, or ends with an error that says why."""
    one = tf.ones([1])

    def call(name, stop, failures):
        while not stop.is_set():
            try:
                # Past the check for init() in Python, which would keep most calls from the kernel.
                pl._operation.allreduce(one, pl.Sum, name)
            except (tf.errors.AbortedError, tf.errors.FailedPreconditionError) as error:
                if "shut down" not in error.message and "init()" not in error.message:
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

    for generation in range(60):
        if not pl.is_initialized():
            start(f"generation{generation}")
        stop, failures = threading.Event(), []
        threads = [threading.Thread(target=call, args=(f"thread{i}", stop, failures)) for i in range(3)]
        for thread in threads:
            thread.start()
        stop.wait(0.02)
        pl.shutdown()
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures, failures


@case
def a_forked_child_leaves_alone():
    """Its exit, which shuts down, waits for nobody and takes nothing from its parent."""
    child = os.fork()
    if child == 0:
        pl.shutdown()
        os._exit(0 if not pl.is_initialized() else 1)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended == (child, 0), ended
    assert (pl.allreduce(tf.ones([4]), op=pl.Sum).numpy() == pl.size()).all()


@case
def a_value_that_one_rank_alone_uses():
    """TensorFlow leaves the operation out of the other ranks' functions: the error tells of that."""

    @tf.function
    def step(x):
        mean = pl.allreduce(x, name="mean loss")
        return mean if pl.rank() == 0 else x

    ended = None
    try:
        step(tf.ones([1]))
    except tf.errors.DeadlineExceededError as error:
        ended = str(error)
    ranks.meet("the end")
    assert (ended is not None) == (pl.rank() == 0), ended
    assert ended is None or ("rank 1" in ended and "use its value" in ended), ended


if __name__ == "__main__":
    ranks.CASES = CASES
    ranks.main()
