"""The CUDA half of the process group where there is no GPU: its methods on CPU tensors, and which way a group takes."""

import ctypes
import os
import threading
import time
import types

import cuda_stand_in
import pytest
import torch
import torch.distributed as dist
from support import Suite, names_of

from paceline import _cuda
from paceline import communicator as core
from paceline._torch import cuda_exchanges, cuda_group, cuda_steps, everybody, guard, lifetime, nccl
from paceline.errors import InvalidArgumentError, PeerLostError, UnsupportedError
from paceline.errors import TimeoutError as PacelineTimeoutError

SUITES = {ranks: Suite("checks_cuda_group.py", ranks) for ranks in (2, 4)}


@pytest.mark.parametrize("ranks", SUITES)
@pytest.mark.parametrize("name", names_of("checks_cuda_group.py"))
def test_methods(ranks, name):
    SUITES[ranks].expect(name)


# --- which way ------------------------------------------------------------------------------------------------------


class Everybody:
    """A communicator whose ranks are where `places` says; each exchange gives all ranks' rows."""

    closed = False

    def __init__(self, places, rank=0, missing=None):
        self.places, self.rank, self.size = places, rank, len(places)
        self.missing = missing or {}
        nodes = sorted({node for node, _ in places})

        class Identity:
            node, local_rank = places[rank]
            local_size = sum(1 for n, _ in places if n == places[rank][0])
            node_count = len(nodes)

        self.identity = Identity
        self.lost = None

    def run(self, collective, dtype, input, output, count, name):
        assert collective == core.ALL_GATHER and dtype == core.DTYPES["uint8"] and name
        for rank, (node, local_rank) in enumerate(self.places):
            size = sum(1 for n, _ in self.places if n == node)
            row = f"{node} {local_rank} {size} {self.missing.get(rank, '')}".encode()
            ctypes.memmove(output + rank * count, row + bytes(count - len(row)), count)

    def check_health(self):
        if self.lost is not None:
            raise self.lost


@pytest.mark.parametrize(
    ("places", "missing", "said"),
    [
        ([(0, 0), (0, 1)], {}, ""),
        ([(0, 0), (1, 0)], {}, None),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], {}, None),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], {}, "order of their nodes"),
        ([(0, 0), (0, 1), (1, 0)], {}, "differ in size: 1 and 2"),
        ([(0, 0), (1, 0)], {1: "no driver: reboot"}, "rank 1 of the group: no driver: reboot"),
    ],
)
def test_the_way_of_a_group(places, missing, said):
    reason = cuda_group._first_reason(Everybody(places, missing=missing), "")
    assert reason == said if said in ("", None) else said in reason


def test_the_first_tensor_decides():
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    for arguments in ([[cpu]], [[[cpu]], [meta]], [[], [cpu]], [None, 3], [meta]):
        assert cuda_group.first_cuda_device(arguments) is None
    assert cuda_group._first_tensor([[], [[cpu]]]) is cpu


def test_a_long_reason_is_cut_between_characters():
    class Alone:
        size = 1

        def run(self, _collective, dtype, input, output, count, name):
            ctypes.memmove(output, input, count)

    for before in ("", ".", ".."):
        (row,) = everybody.texts(Alone(), before + "…" * 999, "reasons")
        assert row == before + "…" * ((1023 - len(before)) // 3)


@pytest.fixture
def group(monkeypatch):
    made = cuda_group.CudaGroup(0, 2, dist.HashStore(), "group", 0.0, None)
    taken = []
    monkeypatch.setattr(made, "_take_path", lambda communicator, device: (taken.append(communicator) or "path", ""))
    monkeypatch.setattr(made, "_take_nccl", lambda device, reason: taken.append(reason) or "nccl")
    monkeypatch.setattr(guard, "watch", lambda group: None)
    made.taken = taken
    yield made
    cuda_group._groups.discard(made)


def with_communicator(monkeypatch, communicator):
    communicator.close = lambda: setattr(communicator, "closed", True)
    monkeypatch.setattr(cuda_group.endpoints, "make_communicator", lambda *_, **__: communicator)
    return communicator


def test_a_group_on_one_node_is_nccls(monkeypatch, group):
    communicator = with_communicator(monkeypatch, Everybody([(0, 0), (0, 1)]))
    assert group._open(torch.device("cpu")) == "nccl" and group.taken == [""] and communicator.closed


def test_a_group_over_nodes_takes_the_path(monkeypatch, group):
    monkeypatch.setattr(_cuda, "missing", lambda: "")
    communicator = with_communicator(monkeypatch, Everybody([(0, 0), (1, 0)]))
    assert group._open(torch.device("cpu")) == "path" and group.taken == [communicator] and not communicator.closed


def test_a_path_that_cannot_be_made_leaves_it_to_nccl(monkeypatch):
    made = cuda_group.CudaGroup(0, 2, dist.HashStore(), "group", 0.0, None)
    communicator = with_communicator(monkeypatch, Everybody([(0, 0), (1, 0)]))
    said = []

    def refuse(*_arguments, **_named):
        raise UnsupportedError("32 MiB of pinned host memory: out of memory")

    monkeypatch.setattr(_cuda, "missing", lambda: "")
    monkeypatch.setattr(_cuda, "CudaCommunicator", refuse)
    monkeypatch.setattr(made, "_take_nccl", lambda device, reason: said.append(reason) or "nccl")
    monkeypatch.setattr(guard, "watch", lambda group: None)
    assert made._open(torch.device("cpu")) == "nccl" and "out of memory" in said[0] and communicator.closed
    cuda_group._groups.discard(made)


def test_what_is_made_later_has_the_time_out_that_was_set(monkeypatch, group):
    communicator = with_communicator(monkeypatch, Everybody([(0, 0), (1, 0)]))
    monkeypatch.setattr(_cuda, "missing", lambda: "")
    given = []

    def make(_rank, _size, _store, _prefix, timeout, announce):
        given.append((timeout, announce))
        return communicator

    monkeypatch.setattr(cuda_group.endpoints, "make_communicator", make)
    group.set_timeout(3.0)
    assert group._open(torch.device("cpu")) == "path" and given == [(3.0, False)]


def test_groups_are_closed_in_one_order(monkeypatch):
    """The latest first, for each close waits for its ranks; NCCL that torch has in the process group is torch's."""
    closed = []

    class Way:
        def __init__(self, name):
            self.name = name

        def shutdown(self):
            closed.append(self.name)

    monkeypatch.setattr(guard, "watch", lambda group: None)
    groups = []
    for name in ("one", "two", "placed"):
        made = cuda_group.CudaGroup(0, 1, dist.HashStore(), name, 0.0, None)
        monkeypatch.setattr(cuda_group, "nccl_backend", lambda *_, name=name: Way(name))
        made.way(torch.device("cpu"))
        groups.append(made)
    groups[2]._unplaced = None
    cuda_group.close_all()
    assert closed == ["two", "one"]
    groups[0].close()
    assert closed == ["two", "one"]


class Done:
    def wait(self, *_):
        pass


class Recorder:
    """A backend of two ranks or more that notes what it is asked for, tensors by their value; 0 is the pair's first."""

    def __init__(self, log, purpose, batches=True, refuses=False):
        self.log, self.purpose, self.refuses = log, purpose, refuses
        if batches:
            self._start_coalescing = lambda: log.append((purpose, "start"))
            self._end_coalescing = lambda: log.append((purpose, "end")) or Done()

    def send(self, tensors, other, _tag):
        self.log.append((self.purpose, f"send {int(tensors[0])} to {other}"))
        if self.refuses and tensors[0]:
            raise ValueError("not contiguous")
        return Done()

    def recv(self, tensors, other, _tag):
        self.log.append((self.purpose, f"receive {int(tensors[0])} from {other}"))
        return Done()

    def abort(self):
        self.log.append((self.purpose, "abort"))

    def shutdown(self):
        self.log.append((self.purpose, "shutdown"))


def message(name, value, peer, tag=0):
    return (name, ([torch.tensor([float(value)])], peer, tag))


@pytest.mark.parametrize("batches", [True, False])
def test_pairs_come_in_one_order_on_all_ranks(batches):
    """Rank 2 of 4 talks to 3, 0 and 1: as (0, 2), (1, 2), (2, 3). Without batches a pair's lower rank sends first."""
    log, made = [], []

    def make(purpose, ranks):
        made.append(tuple(ranks))
        return Recorder(log, tuple(ranks), batches)

    exchanges = cuda_exchanges.Exchanges(2, 4, make, lambda: None)
    operations = [
        message("recv", 1, 3),
        message("send", 2, 0),
        message("send", 3, 3),
        message("recv", 4, 1),
        message("recv", 5, 0, tag=9),
    ]
    work = exchanges.batch(operations)
    work.wait()
    assert [int(tensor) for tensor in work.result()] == [1, 2, 3, 4, 5]
    assert made == [(0, 2), (1, 2), (2, 3)]

    def launches(calls):
        around = (["start"], ["end"]) if batches else ([], [])
        return [(pair, what) for pair, whats in calls for what in (*around[0], *whats, *around[1])]

    first = [(pair, [f"send 0 to {other}", f"receive 0 from {other}"]) for pair, other in zip(made, (0, 0, 1))]
    then = [
        ((0, 2), ["receive 5 from 0", "send 2 to 0"]),
        ((1, 2), ["receive 4 from 0"]),
        ((2, 3), ["send 3 to 1", "receive 1 from 1"]),
    ]
    assert log == launches(first + then)
    exchanges.all_to_all(lambda nccl: Done(), [])
    exchanges.batch([message("send", 6, 1)])
    assert made[3:] == [(0, 1, 2, 3)] and log[len(launches(first + then)) :] == launches([((1, 2), ["send 6 to 0"])])
    log.clear()
    exchanges.close()
    assert log == [(ranks, "shutdown") for ranks in ((0, 2), (1, 2), (2, 3), (0, 1, 2, 3))]


@pytest.mark.parametrize("when", ["called", "waited for"])
def test_an_error_of_nccl_gives_way_to_the_one_that_names_the_rank(monkeypatch, when):
    class Broken:
        def wait(self):
            raise RuntimeError("NCCL error: remote process exited")

    looks = []

    def check():
        looks.append(when)
        if len(looks) == 3:
            raise PeerLostError("rank 1 is gone")

    def call(nccl):
        if when == "called":
            Broken().wait()
        return Broken()

    exchanges = cuda_exchanges.Exchanges(0, 2, lambda *_: "nccl", check)
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        exchanges.all_to_all(call, []).wait()
    monkeypatch.setattr(cuda_exchanges, "_HEARD_SECONDS", 0.02)
    with pytest.raises(RuntimeError, match="NCCL error"):
        exchanges.all_to_all(call, []).wait()
    assert len(looks) > 3


def test_a_batch_of_a_group_in_python_is_one(monkeypatch):
    """torch 2.11 calls its messages one by one, and NCCL would wait for the other rank of the first."""
    lifetime.patch_batches()
    monkeypatch.setattr(dist.distributed_c10d, "_check_p2p_op_list", lambda operations: None)
    monkeypatch.setattr(cuda_group, "first_cuda_device", lambda tensors: tensors[0].device)
    log = []

    class InPython:
        paceline_cuda = "cuda"

        def start_coalescing(self):
            log.append("start")

        def end_coalescing(self):
            log.append("end")
            return "work"

        def drop_batch(self):
            log.append("drop")

    group = InPython()

    def call(tensor, peer, its_group, tag):
        if peer < 0:
            raise ValueError("no such rank")
        assert its_group is group
        log.append((int(tensor), peer, tag))

    def operation(value, peer):
        return types.SimpleNamespace(op=call, tensor=torch.tensor(value), peer=peer, group=group, tag=9)

    assert dist.batch_isend_irecv([operation(1, 3), operation(2, 4)]) == ["work"]
    assert log == ["start", (1, 3, 9), (2, 4, 9), "end"]
    log.clear()
    with pytest.raises(ValueError, match="no such rank"):
        dist.batch_isend_irecv([operation(1, 3), operation(2, -1)])
    assert log == ["start", (1, 3, 9), "drop"]


def test_a_refused_batch_is_closed():
    """NCCL would swallow all that the thread calls from then on."""
    log = []
    exchanges = cuda_exchanges.Exchanges(0, 2, lambda *_: Recorder(log, "pair", refuses=True), lambda: None)
    with pytest.raises(ValueError, match="not contiguous"):
        exchanges.batch([message("send", 7, 1)])
    assert [what for _, what in log].count("start") == [what for _, what in log].count("end") == 2
    future = exchanges.batch([message("recv", 8, 1)]).get_future()
    assert future.done() and int(future.value()[0]) == 8


class Later:
    """An event that comes when it is asked for the third time."""

    def __init__(self, comes=True):
        self.asked, self.comes = 0, comes

    def query(self):
        self.asked += 1
        return self.comes and self.asked > 2


def test_a_step_waits_for_what_streams_wait_for(monkeypatch):
    group = cuda_group.CudaGroup(0, 2, dist.HashStore(), "group", 0.0, None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    event = group._exchanges._waited_for[7] = Later()
    assert group.under_way
    group.arrive()  # of the path alone: what is received later may need what this rank is about to do
    assert event.asked == 0
    group.before_step(optimizer)
    assert event.asked == 3 and not group.under_way
    group._exchanges._waited_for[7] = Later(comes=False)
    group.failure = PeerLostError("rank 1 is gone")
    with pytest.raises(PeerLostError):
        group.before_step(optimizer)
    group.failure = None
    stuck = group._exchanges._waited_for[7] = Later(comes=False)
    looked = []

    def lost():
        looked.append(stuck.asked)
        if len(looked) > 3:
            raise PeerLostError("rank 1 is gone")

    monkeypatch.setattr(group, "_raise_failure", lost)
    with pytest.raises(PeerLostError):
        group.before_step(optimizer)


def test_a_rank_that_does_not_come_is_named():
    store, others = dist.HashStore(), {"rank 0 of the group": "0", "rank 3 of the group": "3"}
    with pytest.raises(PacelineTimeoutError, match=r"rank 3 of the group did not come within 0\.05 s"):
        cuda_exchanges.meet(store, "0", others, 0.05, lambda: None)
    store.set("3", "1")
    cuda_exchanges.meet(store, "0", others, 0.05, lambda: None)

    def lost():
        raise PeerLostError("rank 5 is gone")

    with pytest.raises(PeerLostError):
        cuda_exchanges.meet(store, "0", {"rank 4": "4"}, 0, lost)


def test_what_it_makes_leaves_lost_ranks_to_the_guard(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "7")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    with nccl.errors_are_ours():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
        assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "7"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "7"


def test_one_node_has_nccl_for_everything_and_asks_nobody(monkeypatch):
    """No communicator is made, so two ranks of many may begin."""
    group = cuda_group.CudaGroup(0, 3, dist.HashStore(), "group", 0.0, Everybody([(0, 0), (0, 1), (0, 2)]))
    monkeypatch.setattr(cuda_group, "nccl_backend", lambda *_: "nccl")
    monkeypatch.setattr(guard, "watch", lambda group: None)
    assert group.exchanges() is None and group.way(torch.device("cpu")) == "nccl" and group.exchanges() is None
    over_nodes = cuda_group.CudaGroup(0, 2, dist.HashStore(), "group", 0.0, Everybody([(0, 0), (1, 0)]))
    assert over_nodes.exchanges() is not None
    over_nodes._nccl = "nccl"  # what the path can't carry is NCCL's altogether
    assert over_nodes.exchanges() is None
    group._unplaced = None
    cuda_group._groups.discard(group)


def exchanging(monkeypatch, log, world):
    """A group whose rank 0 has sent something to rank 1 and to all."""
    store = dist.HashStore()
    monkeypatch.setattr(cuda_group, "nccl_backend", lambda *given: Recorder(log, given[1:3]))
    group = cuda_group.CudaGroup(0, 3, store, "talkers", 5.0, world)
    for purpose in ("000000-000001", "all"):
        for rank in (1, 2):
            store.set(f"{group._prefix('exchange')}/{purpose}/here/{rank}", "1")
    group.exchanges().batch([message("send", 4, 1)])
    group.exchanges().all_to_all(lambda nccl: Done(), [])
    return group


def test_what_exchanges_ends_with_the_world(monkeypatch):
    monkeypatch.setattr(guard, "watch", lambda group: None)
    log = []
    group = exchanging(monkeypatch, log, Everybody([(0, 0), (1, 0), (2, 0)]))
    assert [what for _, what in log].count("start") == 2
    log.clear()
    cuda_group.close_all()
    assert log == [((0, 2), "shutdown"), ((0, 3), "shutdown")]
    cuda_group.close_all()
    assert len(log) == 2 and group not in cuda_group._groups


@pytest.mark.parametrize("in_batch", [False, True])
def test_many_tensors_by_an_nccl_that_takes_one(in_batch):
    """As torch 2.0 to 2.14 show theirs to Python."""
    calls = []

    class Older:
        def _start_coalescing(self):
            calls.append("start")

        def _end_coalescing(self):
            calls.append("end")
            return "whole"

        def _allgather_base(self, output, source, opts="none"):
            calls.append((output, source, opts))
            return f"work {source}"

    work = cuda_group.call_way(Older(), "allgather_into_tensor_coalesced", in_batch, ["A", "B"], ["a", "b"], "opts")
    one_by_one = [("A", "a", "opts"), ("B", "b", "opts")]
    assert calls == (one_by_one if in_batch else ["start", *one_by_one, "end"])
    assert work == ("work b" if in_batch else "whole")
    calls.clear()
    cuda_group.call_way(Older(), "all_gather_single", in_batch, "A", "a")
    assert calls == [("A", "a", "none")]


def test_the_setting_leaves_it_to_nccl(monkeypatch, group):
    monkeypatch.setenv("PACELINE_CUDA_PATH", "torch")
    assert group._open(torch.device("cpu")) == "nccl" and "PACELINE_CUDA_PATH=torch" in group.taken[0]


def test_asked_for_it_is_an_error(monkeypatch, group):
    monkeypatch.setenv("PACELINE_CUDA_PATH", "paceline")
    communicator = with_communicator(monkeypatch, Everybody([(0, 0), (1, 0)], missing={1: "no driver"}))
    with pytest.raises(UnsupportedError, match=r"PACELINE_CUDA_PATH=paceline.*rank 1 of the group: no driver"):
        group._open(torch.device("cpu"))
    assert communicator.closed


def test_torch_without_nccl_is_named(monkeypatch):
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(UnsupportedError, match="built without NCCL"):
        cuda_group.nccl_backend(dist.HashStore(), 0, 1, 0)


def test_another_device_is_named(group):
    way = cuda_stand_in.CudaCollectives(cuda_stand_in.PointerPath(Everybody([(0, 0), (1, 0)])), None)
    way.device = torch.device("cuda", 0)
    group._way = way
    assert group.way(torch.device("cuda", 0)) is way
    with pytest.raises(UnsupportedError, match="cuda:0, got one on cuda:1"):
        group.way(torch.device("cuda", 1))


def test_another_backend_takes_the_place():
    """From then on torch calls it without us."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.distributed_c10d._get_default_group()
        mine = group._get_backend(torch.device("cpu"))
        other = dist.ProcessGroupGloo(dist.PrefixStore("other", dist.HashStore()), 0, 1)
        cuda_group.take_place(mine, torch.device("cpu"), other)
        assert group._get_backend(torch.device("cpu")) is other
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()


def test_compress_names_its_backend():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InvalidArgumentError, match="cuda:paceline"):
            cuda_group.compress()
    finally:
        dist.destroy_process_group()


# --- faults -----------------------------------------------------------------------------------------------------------


class Aborted:
    def __init__(self):
        self.done = threading.Event()

    def abort(self):
        self.done.set()


def test_a_lost_rank_ends_nccl_too(monkeypatch):
    """The guard hears of it from the world's communicator, for NCCL inside a node would wait for ever."""
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.01)
    world = Everybody([(0, 0), (0, 1)])
    group = cuda_group.CudaGroup(0, 2, None, "group", 0.0, world)
    group._nccl = group._way = Aborted()
    cuda_group._groups.add(group)
    guard.watch(group)
    time.sleep(0.05)
    assert not group._nccl.done.is_set()
    world.lost = PeerLostError("rank 1 is gone")
    assert group._nccl.done.wait(5)
    cuda_steps.watch(group)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    cuda_group.watch_steps(group)
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(parameter.detach(), torch.ones(2))
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        group.way(torch.device("cuda", 0))
    cuda_steps.unwatch(group)
    cuda_group._groups.discard(group)


def test_a_lost_rank_ends_exchanges(monkeypatch):
    """NCCL would wait for its message for ever, and steps that use what has not come must not be made."""
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.01)
    log, world = [], Everybody([(0, 0), (1, 0), (2, 0)])
    group = exchanging(monkeypatch, log, world)
    log.clear()
    world.lost = PeerLostError("rank 1 is gone")
    until = time.monotonic() + 5
    while len(log) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(what for _, what in log) == ["abort", "abort"]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        torch.optim.SGD([parameter], lr=1.0).step()
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        group.exchanges()
    cuda_steps.unwatch(group)
    log.clear()
    group.close()
    assert log == [], "nobody is waited for after a fault"
