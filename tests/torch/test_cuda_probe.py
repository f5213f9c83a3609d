"""The choice between Paceline and NCCL at the start, on a clock of the test's own."""

import threading

import pytest

pytest.importorskip("torch")

from paceline._torch import cuda_probe
from paceline.errors import PeerLostError

MIB = 1 << 20


class Network:
    """Two ways with a latency and a rate each; time passes only when one of them carries something."""

    def __init__(self, monkeypatch, ours, theirs):
        self.now = 0.0
        self.carried = []
        self.rates = {"ours": ours, "theirs": theirs}
        monkeypatch.setattr(cuda_probe.time, "perf_counter", lambda: self.now)

    def way(self, name):
        def carry(size):
            latency, rate = self.rates[name]
            self.carried.append((name, size))
            self.now += latency + size / rate

        return carry

    def race(self):
        return cuda_probe.race(self.way("ours"), self.way("theirs"), lambda seconds: seconds)


def test_large_sizes_on_a_fast_line(monkeypatch):
    network = Network(monkeypatch, (1e-4, 2.5e9), (2e-4, 2e9))
    ours, theirs, size = network.race()
    assert size == 16 * MIB
    assert ours == pytest.approx(1e-4 + size / 2.5e9) and theirs == pytest.approx(2e-4 + size / 2e9)
    assert cuda_probe.reason_for_torch(ours, theirs, size) == ""


def test_small_sizes_on_a_slow_line_take_no_seconds(monkeypatch):
    network = Network(monkeypatch, (1e-3, 1e7), (1e-3, 1e7))
    assert network.race()[2] == MIB
    assert network.now < 2


def test_turns_alternate_and_ranks_begin_together(monkeypatch):
    network = Network(monkeypatch, (1e-3, 1e9), (1e-3, 1e9))
    size = network.race()[2]
    timed = [entry for entry in network.carried if entry[1] == size]
    assert [name for name, _ in timed[-6:]] == ["ours", "theirs"] * 3
    at = [i for i, entry in enumerate(network.carried) if entry[1] == size][-6:]
    assert all(network.carried[i - 1] == ("theirs", 16) for i in at)


def test_the_slowest_rank_counts(monkeypatch):
    network = Network(monkeypatch, (0, 1e9), (0, 1e9))
    ours, theirs, _ = cuda_probe.race(
        network.way("ours"), network.way("theirs"), lambda seconds: [seconds[0] * 2, seconds[1] * 3]
    )
    assert theirs == pytest.approx(1.5 * ours)


def test_nccl_is_kept_only_where_it_is_clearly_faster():
    assert cuda_probe.reason_for_torch(0.010, 0.0095, 16 * MIB) == ""
    reason = cuda_probe.reason_for_torch(0.0062, 0.0051, 16 * MIB)
    assert "16 MiB in 5.1 ms" in reason and "6.2" in reason and "PACELINE_CUDA_PATH=paceline" in reason


def test_the_start_up_line_says_what_was_found_and_what_it_took():
    said = cuda_probe.outcome(0.0062, 0.0051, 16 * MIB, 0.314)
    assert said == "tried at the start, for 0.31 s: 16 MiB in 6.2 ms, by NCCL between nodes 5.1"


class Made:
    """What the choice would make of a path: it writes down what becomes of it."""

    codec, closed = "none", False

    def __init__(self):
        self.steps = self.communicator = self

    def forget(self):
        pass

    def close(self):
        self.closed = True

    def describe(self):
        return "paceline: by Paceline"


@pytest.fixture
def choice(monkeypatch):
    """f(seconds of ours, of NCCL, …): (the path that cuda._choose() chose or None, what it said, whether it tried)."""
    from paceline._torch import cuda

    def choose(ours, theirs, wish="auto", codec="none", backend="nccl"):
        said, tried = [], []

        def compare(*_):
            tried.append(True)
            return ours, theirs, 16 * MIB

        made = Made()
        made.codec = codec
        monkeypatch.setattr(cuda, "say_once", said.append)
        monkeypatch.setattr(cuda.dist, "get_rank", lambda _: 0)
        monkeypatch.setattr(cuda.dist, "get_backend_config", lambda _: f"cpu:gloo,cuda:{backend}")
        monkeypatch.setattr(cuda.core, "setting", lambda name, _face: wish if name == "cuda_path" else "0")
        monkeypatch.setattr(cuda.endpoints, "connect", lambda *_, **__: made)
        monkeypatch.setattr(cuda, "_agree", lambda *_: (made, ""))
        monkeypatch.setattr(cuda, "CudaEndpoint", lambda *_: made)
        monkeypatch.setattr(cuda_probe, "compare", compare)
        chosen = cuda._choose(None, None)
        assert made.closed == (chosen is None)
        return chosen, said, bool(tried)

    return choose


def test_the_faster_way_is_chosen_and_the_line_says_why(choice):
    chosen, said, tried = choice(0.005, 0.006)
    assert chosen is not None and tried
    assert "16 MiB in 5.0 ms, by NCCL between nodes 6.0" in said[0] and said[1] == "by Paceline"
    chosen, said, tried = choice(0.006, 0.005)
    assert chosen is None and tried
    assert "by NCCL between nodes 5.0" in said[0]
    assert said[1].startswith("the CUDA model keeps torch's own all-reduce: NCCL carried 16 MiB in 5.0 ms")


@pytest.mark.parametrize("given", [{"wish": "paceline"}, {"codec": "fp16"}, {"backend": "gloo"}])
def test_what_the_user_chose_is_not_tried(choice, given):
    chosen, said, tried = choice(0.006, 0.001, **given)
    assert chosen is not None and not tried and said[0] == "by Paceline"


class LostSoon:
    """A communicator, and torch's NCCL: a rank is lost once NCCL waits for it, and the wait ends by an abort."""

    def __init__(self, is_lost):
        self.is_lost = is_lost
        self.aborted = threading.Event()

    def check_health(self):
        if self.is_lost:
            raise PeerLostError("peer lost: rank 3 (host b)")

    def _get_backend(self, _device):
        return self

    def abort(self):
        self.aborted.set()


def test_nccl_does_not_wait_for_a_rank_that_is_lost():
    job = LostSoon(True)
    with pytest.raises(PeerLostError, match="rank 3"), cuda_probe.ends_with(job, job, None):
        assert job.aborted.wait(20)
        raise RuntimeError("NCCL communicator was aborted")
    job = LostSoon(True)
    with pytest.raises(PeerLostError, match="rank 3"), cuda_probe.ends_with(job, job, None):
        assert job.aborted.wait(20)  # a kernel that is aborted tells nobody
    job = LostSoon(False)
    with pytest.raises(RuntimeError, match="out of memory"), cuda_probe.ends_with(job, job, None):
        raise RuntimeError("CUDA out of memory")
    with cuda_probe.ends_with(job, job, None):
        pass
    assert not job.aborted.is_set()
