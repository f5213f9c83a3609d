"""overlap="forward" on CUDA, seen from the host: streams and a communicator that write down what is asked of them."""

import contextlib
import ctypes
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline._torch import cuda, cuda_overlap, cuda_steps, gates, optimizer
from paceline._torch.attachment import Attachment
from paceline._torch.overlap import Overlap
from paceline.errors import PeerLostError, UnsupportedError

LOG = []
EVENTS = itertools.count()


class FakeEvent:
    def __init__(self, name):
        self.name = name

    def synchronize(self):
        pass


class FakeStream:
    cuda_stream = 0

    def __init__(self, name):
        self.name = self.cuda_stream = name

    def wait_event(self, event):
        LOG.append((self.name, "waits for", event.name))

    def record_event(self):
        event = FakeEvent(f"event {next(EVENTS)}")
        LOG.append((self.name, "records", event.name))
        return event

    def synchronize(self):
        pass


class FakeCommunicator:
    """Buckets arrive when told; results are those of one rank."""

    closed = False

    def __init__(self):
        self.arrived_ones = set()
        self.error = None
        self.word = ctypes.c_float(0)  # the gate
        self.submitted = 0

    def all_reduce(self, *_, **__):
        self.submitted += 1
        return self.submitted

    def arrived(self, operation):
        return operation in self.arrived_ones or self.error is not None

    def wait_operation(self, operation):
        LOG.append(("host", "waits for", operation))
        if self.error is not None and operation not in self.arrived_ones:
            raise self.error
        self.arrived_ones.add(operation)
        return True

    def join(self, operation, stream):
        LOG.append((stream, "joins", operation))

    def gate(self):
        if self.error is not None:
            raise self.error
        return ctypes.addressof(self.word)


class FakeEndpoint:
    process_group = None
    device = torch.device("cpu")
    momentum = 0.0
    size = 1
    codec = "none"
    join = cuda.CudaEndpoint.join

    def __init__(self):
        self.communicator = FakeCommunicator()
        self.steps = cuda_steps.CudaSteps(self, False)


class FakeAttachment:
    """What CudaCarrier uses of a CudaAttachment."""

    other_buckets = Attachment.other_buckets

    def __init__(self, model):
        self.endpoint = FakeEndpoint()
        self._ddp = weakref.ref(model)
        self._rebuilt = None
        self.model = 0

    def process_group(self):
        return None

    def carries(self, _buffer):
        return True

    def encoded_layout(self, bucket):
        return None, b"bucket", ()

    def usual_elements(self):
        return 1 << 20

    def prepare(self, *_):
        return None

    def prepare_span(self, buffer, first, elements, name):
        return first, elements

    def submit(self, calls):
        if calls is not None:
            LOG.append(("path", "takes", calls))
        return self.endpoint.communicator.all_reduce()


@pytest.fixture
def trained(monkeypatch, request):
    """(model, optimizer, communicator, overlap) of a DDP model of one rank, in a bucket a layer. param: SGD's."""
    LOG.clear()
    monkeypatch.setattr(gates, "_CPU_STANDS_IN", True)
    main, updates = FakeStream("main"), FakeStream("updates")

    @contextlib.contextmanager
    def current(stream):
        former = torch.cuda.current_stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        yield
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: former)

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: updates)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(cuda_overlap, "Future", lambda devices: torch.futures.Future())
    monkeypatch.setattr(optimizer._Overlapped, "_paceline_update", logged_update)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    request.addfinalizer(dist.destroy_process_group)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-6)
    attachment = FakeAttachment(model)
    overlap = Overlap(model, cuda_overlap.CudaCarrier(attachment), {})

    def hook(state, bucket):
        return overlap.take(bucket)

    model.register_comm_hook(None, hook)
    made = torch.optim.SGD(model.parameters(), lr=1.0, **getattr(request, "param", {}))
    optimizer._become(made, optimizer._Overlapped, {}, [])
    made._paceline_overlaps.append(overlap)
    made._paceline_own()
    for _ in range(2):  # DDP's buckets are final
        made.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        made.step()
    made.synchronize()
    LOG.clear()
    yield model, made, attachment.endpoint.communicator, overlap
    overlap.end()
    attachment.endpoint.steps.forget()


_update = optimizer._Overlapped._paceline_update


def logged_update(self, groups, places, pairs, gate):
    LOG.append((torch.cuda.current_stream().name, "updates", len(pairs)))
    _update(self, groups, places, pairs, gate)


def one_pass(model, made):
    made.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    made.step()


def test_backward_and_step_make_the_host_wait_for_nothing(trained):
    model, made, _, overlap = trained
    one_pass(model, made)
    assert [entry for entry in LOG if entry[0] == "host"] == []
    assert [entry[:2] for entry in LOG] == [("main", "records")], "updates come after what the stream holds at step()"
    assert len(overlap._flights) == 3 and not any("updates" in entry for entry in LOG)


def test_a_layer_waits_for_its_own_bucket_and_its_stream_for_the_update(trained):
    model, made, communicator, overlap = trained
    one_pass(model, made)
    overlap.order.order = sorted(overlap.order._seen, reverse=True)  # the first layer's goes first
    one_pass(model, made)
    asked = LOG[-1][2]
    LOG.clear()
    operation = overlap._flights[-1].operation  # the first layer's
    whole_way = [
        ("host", "waits for", operation),
        ("updates", "waits for", asked),
        ("updates", "joins", operation),
        ("updates", "updates", 1),
    ]
    model.module[0](torch.ones(1, 4))
    assert LOG[:4] == whole_way
    event = LOG[4][2]
    assert LOG[4:] == [("updates", "records", event), ("main", "waits for", event)]
    assert communicator.arrived_ones >= {operation} and sum(f.arrived for f in overlap._flights) == 1


def test_what_arrives_meanwhile_is_updated_but_not_waited_for_by_the_stream(trained):
    model, made, _, overlap = trained
    one_pass(model, made)
    asked = LOG[-1][2]
    LOG.clear()
    model.module[0](torch.ones(1, 4))  # its bucket comes last
    records = [entry[2] for entry in LOG if entry[:2] == ("updates", "records")]
    expected = []
    for flight, event in zip(overlap._flights, records):
        expected += [
            ("host", "waits for", flight.operation),
            ("updates", "waits for", asked),
            ("updates", "joins", flight.operation),
            ("updates", "updates", 1),
            ("updates", "records", event),
        ]
    expected.append(("main", "waits for", records[-1]))
    assert expected == LOG
    LOG.clear()
    model.module[2](torch.ones(1, 4))
    assert [("main", "waits for", records[0])] == LOG


def test_updates_meanwhile_end_when_the_wanted_bucket_has_arrived(trained):
    model, made, communicator, overlap = trained
    one_pass(model, made)
    wanted = overlap._flights[-1]
    there = communicator.arrived

    def soon(operation):
        return overlap._flights[0].arrived if operation == wanted.operation else there(operation)

    communicator.arrived = soon
    LOG.clear()
    model.module[0](torch.ones(1, 4))
    assert [f.arrived for f in overlap._flights] == [True, False, True]


def test_no_update_is_enqueued_after_a_fault(trained):
    model, made, communicator, overlap = trained
    one_pass(model, made)
    before = [p.detach().clone() for f in overlap._flights for p, _ in f.gradients]
    communicator.error = PeerLostError("rank 1 is gone")
    LOG.clear()
    for action in (lambda: model(torch.ones(1, 4)), made.step, made.synchronize, model.state_dict):
        with pytest.raises(PeerLostError):
            action()
    after = [p for f in overlap._flights for p, _ in f.gradients]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert not any("updates" in entry for entry in LOG)


def test_gradients_in_hand_are_joined_by_the_stream_that_asks(trained):
    model, made, _, overlap = trained
    made.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    parameters = [p for f in overlap._flights for p, _ in f.gradients]
    with pytest.raises(UnsupportedError, match="synchronize"):
        parameters[0].grad.sum()
    LOG.clear()
    made.synchronize()
    assert [entry for entry in LOG if entry[:2] == ("main", "joins")] == [
        ("main", "joins", f.operation) for f in overlap._flights
    ]
    assert all(p.grad.sum().item() != 0 for p in parameters)


fused = pytest.mark.parametrize("trained", [{"fused": True}], indirect=True)


@fused
def test_fused_updates_are_enqueued_by_step_and_the_forward_pass_waits_on_the_device(trained):
    model, made, _, overlap = trained
    one_pass(model, made)
    asked = LOG[0][2]
    records = [entry[2] for entry in LOG if entry[:2] == ("updates", "records")]
    expected = [("main", "records", asked), ("updates", "waits for", asked)]
    for flight, event in zip(overlap._sent, records):
        stages = [("joins", flight.operation), ("updates", 1), ("records", event)]
        expected += [("updates", *stage) for stage in stages]
    assert expected == LOG and len(records) == 3
    LOG.clear()
    loss = model(torch.ones(2, 4)).sum()
    # The first layer's bucket was sent last.
    assert [("main", "waits for", event) for event in reversed(records)] == LOG, "the host waits for nothing"
    operations = [flight.operation for flight in overlap._sent]
    LOG.clear()
    loss.backward()
    assert LOG[:3] == [("host", "waits for", operation) for operation in operations], "at the latest it hears here"


@fused
def test_what_has_arrived_by_step_is_one_update(trained):
    model, made, communicator, overlap = trained
    made.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    first, second, third = overlap._sent
    communicator.arrived_ones |= {first.operation, second.operation}
    pairs = [pair for flight in overlap._sent for pair in flight.gradients]
    expected = [(parameter, (parameter - gradient).detach()) for parameter, gradient in pairs]
    LOG.clear()
    made.step()
    joins = [("updates", "joins", flight.operation) for flight in (first, second, third)]
    one, two = first.updated.name, third.updated.name
    assert second.updated.name == one != two
    assert LOG[2:] == [
        *joins[:2],
        ("updates", "updates", 2),
        ("updates", "records", one),
        joins[2],
        ("updates", "updates", 1),
        ("updates", "records", two),
    ]
    assert all(torch.equal(parameter, after) for parameter, after in expected)


@fused
def test_other_reads_wait_for_fused_updates_on_the_device_and_what_is_saved_on_the_host(trained):
    model, made, _, overlap = trained
    overlap.order.learns = False
    one_pass(model, made)
    LOG.clear()
    flight = overlap._flights[-1]
    assert model.module[0].weight is flight.gradients[0][0]
    assert [("main", "waits for", flight.updated.name)] == LOG
    for action in (model.state_dict, model.module[0].state_dict, made.synchronize, made.state_dict):
        one_pass(model, made)
        LOG.clear()
        action()
        assert sum(entry[0] == "host" for entry in LOG) == 3


@pytest.mark.parametrize("trained", [{"fused": True}, {}], indirect=True)
def test_a_read_on_another_stream_does_not_spare_the_training_stream_its_wait(trained):
    """And the gradient that the script keeps is made where the script will look at it."""
    model, made, _, overlap = trained
    one_pass(model, made)
    flight = overlap._flights[-1]
    made_on, for_the_script = [], overlap._for_the_script

    def noted(gradient):
        made_on.append(torch.cuda.current_stream().name)
        return for_the_script(gradient)

    overlap._for_the_script = noted
    LOG.clear()
    with torch.cuda.stream(FakeStream("side")):
        assert model.module[0].weight is flight.gradients[0][0]
    for stream in ("side", "main"):
        assert (stream, "waits for", flight.updated.name) in LOG
    assert made_on == ["main"]
    LOG.clear()
    model.module[0](torch.ones(1, 4))
    assert LOG == []


@fused
def test_after_a_fault_the_gate_keeps_fused_updates_from_changing_anything(trained):
    model, made, communicator, overlap = trained
    before = [p.detach().clone() for p in model.module.parameters()]
    communicator.word.value = 1.0
    one_pass(model, made)
    communicator.error = PeerLostError("rank 1 is gone")
    loss = model(torch.ones(2, 4)).sum()
    for action in (loss.backward, made.step, made.synchronize, lambda: model(torch.ones(1, 4)), model.state_dict):
        with pytest.raises(PeerLostError):
            action()
    after = [p for f in sorted(overlap._flights, key=lambda f: -f.index) for p, _ in f.gradients]
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and len(after) == 3
    assert not any(hasattr(made, name) for name in ("found_inf", "grad_scale"))


@fused
def test_each_update_reads_the_gate_once_behind_its_own_bucket(trained, monkeypatch):
    """Of the live word two blocks of a kernel may read different things, and half a tensor would be updated."""
    model, made, communicator, overlap = trained
    given = []

    def read_gate(gate):
        assert gate.data_ptr() == ctypes.addressof(communicator.word)
        LOG.append((torch.cuda.current_stream().name, "reads the gate"))
        return gate.clone()

    def update(self, groups, places, pairs, gate):
        given.append(gate)
        logged_update(self, groups, places, pairs, gate)

    monkeypatch.setattr(overlap.carrier.steps, "read_gate", read_gate)
    monkeypatch.setattr(optimizer._Overlapped, "_paceline_update", update)
    one_pass(model, made)
    expected = []
    for flight in overlap._sent:
        expected += [("joins", flight.operation), ("reads the gate",), ("updates", 1)]
    assert [
        entry[1:] for entry in LOG if entry[0] == "updates" and entry[1] not in ("records", "waits for")
    ] == expected
    assert len(given) == 3 and not any(gate.data_ptr() == ctypes.addressof(communicator.word) for gate in given)


@pytest.mark.parametrize("trained", [{"fused": True}, {}], indirect=True)
def test_what_torch_carries_is_waited_for_by_step(trained, monkeypatch):
    model, made, communicator, overlap = trained
    monkeypatch.setattr(dist, "all_reduce", lambda buffer, group: LOG.append(("torch", "carries", buffer.numel())))
    overlap.carrier._attachment.carries = lambda buffer: False
    for known in overlap._known.values():
        known.travels = False
    communicator.communicator = communicator
    communicator.check_health = lambda: LOG.append(("host", "asks"))
    ended = iter([False, True])

    class Behind:
        def query(self):
            LOG.append(("host", "looks"))
            return next(ended)

    monkeypatch.setattr(cuda_steps, "_behind", lambda device: Behind())
    one_pass(model, made)
    said = [entry[:2] for entry in LOG if entry[0] in ("torch", "host") or entry[1] == "updates"]
    looks = [("host", "looks"), ("host", "asks"), ("host", "looks"), ("host", "asks")]
    assert said[:7] == [("torch", "carries")] * 3 + looks and ("updates", "updates") in said[7:]
    assert {entry for entry in said[7:] if entry[0] == "host"} == set()


@fused
def test_gradients_that_nobody_asked_for_are_waited_for_as_ever(trained):
    model, made, _, overlap = trained
    other = torch.optim.SGD([model.module[2].weight], lr=1.0, fused=True)
    optimizer._become(other, optimizer._Overlapped, {}, [])
    other._paceline_overlaps.append(overlap)
    other._paceline_own()
    one_pass(model, made)  # the other one does not step
    LOG.clear()
    model(torch.ones(2, 4))
    assert sum(entry[0] == "host" for entry in LOG) == 3
    assert model.module[2].weight.grad is not None and overlap._flights == []


@fused
def test_beside_an_optimizer_without_a_gate_each_keeps_its_own_rule(trained):
    model, made, _, overlap = trained
    other = torch.optim.SGD([model.module[2].weight], lr=1.0)
    optimizer._become(other, optimizer._Overlapped, {}, [])
    other._paceline_overlaps.append(overlap)
    other._paceline_own()
    for first, second in ((other, made), (made, other)):
        made.zero_grad()
        other.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        operation = next(f.operation for f in overlap._flights if f.gradients[0][0] is model.module[2].weight)
        LOG.clear()
        first.step()
        second.step()
        assert sum(entry[1] == "updates" for entry in LOG) == 2, "those of the fused one"
        assert ("updates", "joins", operation) not in LOG and not any(entry[0] == "host" for entry in LOG)
        LOG.clear()
        model(torch.ones(2, 4))
        assert LOG.index(("host", "waits for", operation)) < LOG.index(("updates", "joins", operation))


@fused
def test_an_update_without_a_gate_is_not_enqueued_with_a_later_one_that_has_one(trained):
    model, made, _, overlap = trained
    made.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    shared = overlap._flights[0]
    other = torch.optim.SGD([shared.gradients[0][0]], lr=1.0)
    shared.owned[id(other)] = shared.owned[id(made)]
    LOG.clear()
    overlap.request(other, lambda pairs, gate: LOG.append(("host", "is asked for an update", gate)))
    made.step()
    assert [entry[:2] for entry in LOG] == [("main", "records")] * 2, "the bucket has not arrived"


@pytest.mark.parametrize("trained", [{"fused": True}, {}], indirect=True)
def test_a_bucket_that_nobody_updates_is_not_written_while_it_is_under_way(trained):
    model, made, _, overlap = trained
    made.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    model.module[1].weight.grad = None
    made.step()
    operation = next(f.operation for f in overlap._flights if f.gradients[0][0] is model.module[1].weight)
    LOG.clear()
    model(torch.ones(2, 4))
    assert LOG.count(("main", "joins", operation)) == 1
    assert sum(entry[1] == "updates" for entry in LOG) in (0, 2)


class TimedEvent(FakeEvent):
    """Happens when the test's clock says; one a mark."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self, stream):
        assert stream.name == "main"
        TimedEvent.clock += 0.25
        self.at = TimedEvent.clock

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_the_order_is_worked_out_from_events_and_from_all_reduces_in_stream_order(trained, monkeypatch):
    model, made, communicator, overlap = trained
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    overlap.carrier.process_group = dist.group.WORLD
    for _ in range(4):
        one_pass(model, made)
    assert overlap.order.order is None
    submitted = communicator.submitted
    LOG.clear()
    for _ in range(3):
        one_pass(model, made)
    probes = communicator.submitted - submitted - 3 * len(overlap._flights)
    assert probes == 3 * (1 + 4), "one alone and four at once, three times"
    joined = [LOG[i : i + 2] for i, entry in enumerate(LOG) if entry[0] == "host"]
    joined = [pair[0][2] for pair in joined if pair[1] == ("main", "joins", pair[0][2])]
    assert [b - a for a, b in zip(joined, joined[1:])] == [1, 1, 4, 4, 4], "the last of them is waited for"
    step = overlap.order.step
    assert sorted(overlap.order.order) == [(0, 0), (1, 0), (2, 0)]
    assert step.ready == pytest.approx([0.0, 0.25, 0.5])
    assert step.tail == pytest.approx([0.25, 0.5, 0.75]), "the first layer's bucket has the longest"
