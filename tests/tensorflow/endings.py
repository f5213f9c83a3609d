"""Ranks that end, die or stay away while others go on: `endings.py DIRECTORY RANK SIZE CASE…`, as ranks.py is run."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import ranks
from ranks import case, np, pl, start, tf


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


@case
def an_interrupt_ends_a_wait_that_nobody_else_ends():
    """Ctrl-C on rank 0, whose peer never comes: KeyboardInterrupt soon, and both processes can end."""
    assert (pl.allreduce(tf.ones([4]), op=pl.Sum).numpy() == pl.size()).all()
    if pl.rank() == 1:
        ranks.meet("interrupted")
        return
    began = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        pl.allreduce(tf.ones([4]), op=pl.Sum, name="of rank 0 alone")
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    finally:
        took = time.monotonic() - began
        ranks.meet("interrupted")
    assert took < 10, took
    assert signal.set_wakeup_fd(-1) == -1, "signals are still reported"


@case
def a_handler_of_the_scripts_own_is_left_alone():
    """It runs when the wait is over, which goes on."""
    heard = []
    if pl.rank() == 1:
        time.sleep(2)
    else:
        signal.signal(signal.SIGINT, lambda *_: heard.append("SIGINT"))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert (pl.allreduce(tf.ones([4]), op=pl.Sum, name="late").numpy() == pl.size()).all()
    assert heard == (["SIGINT"] if pl.rank() == 0 else [])


@case
def a_wait_that_ends_soon_is_not_ended():
    """The job lives on where the script catches KeyboardInterrupt."""
    signalled = Path(sys.argv[1]) / "signalled"

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        signalled.touch()

    if pl.rank() == 1:
        while not signalled.exists():
            time.sleep(0.01)
        time.sleep(0.2)
    else:
        threading.Timer(0.3, interrupt).start()
    try:
        pl.allreduce(tf.ones([4]), op=pl.Sum, name="soon")
        assert pl.rank() == 1
    except KeyboardInterrupt:
        assert pl.rank() == 0
    time.sleep(1.2)
    assert (pl.allreduce(tf.ones([4]), op=pl.Sum).numpy() == pl.size()).all()


@case
def a_killed_rank_is_named():
    """One dies while the others wait for it: rank 0, which decides the order, or the last one."""
    victim, directory = int(os.environ["VICTIM"]), Path(sys.argv[1])
    if pl.rank() == victim:
        (directory / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            pl.allreduce(tf.ones([1000]), op=pl.Sum, name="orphan")
    except tf.errors.UnavailableError as error:
        heard = time.monotonic()
        assert f"rank {victim} (host {socket.gethostname()})" in str(error), error
    assert heard - float((directory / "killed").read_text()) < 2


@case
def left_out_by_one_rank():
    """What one rank never reaches ends after PACELINE_TIMEOUT by its name, in eager code and in a function."""
    for lonely, how in enumerate((pl.allreduce, tf.function(lambda x, name: pl.allreduce(x, name=name)))):
        name = f"left out by all but {lonely}"
        if pl.rank() == lonely:
            try:
                how(tf.ones([4]), name=name)
            except tf.errors.DeadlineExceededError as error:
                for text in (name, f"rank {1 - lonely}", "PACELINE_TIMEOUT"):
                    assert text in str(error), error
            else:
                raise AssertionError("no error")
        ranks.meet(name)
    np.testing.assert_allclose(pl.allreduce(tf.ones([4]), op=pl.Sum, name="after").numpy(), np.full(4, pl.size()))


@case
def left_by_one_rank():
    """A rank without a batch left shuts down: what waits for it ends at once, by its name, and so does what comes."""
    leaver = pl.size() - 1
    if pl.rank() == leaver:
        pl.shutdown()
        return
    for name in ("last batch", "one more"):
        try:
            pl.allreduce(tf.ones([4]), name=name)
        except tf.errors.UnavailableError as error:
            assert name in str(error) and f"rank {leaver} has shut down" in str(error), error
        else:
            raise AssertionError("no error")


if __name__ == "__main__":
    ranks.main()
