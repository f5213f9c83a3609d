"""The gradients of one DDP model under way, and the updates that wait for them.

The hook hands a bucket over and gives DDP a completed future, so backward() ends without a wait. step() notes which
updates it wants, with its hyperparameters of that moment. An update is carried out by the thread that trains, once its
gradient has arrived: in step(), or when the forward pass (or anything else that reads through modules) comes to one
of its parameters. So nothing changes a parameter behind the script's back, and after a fault no parameter has changed
whose gradient had not arrived.

Where a carrier has a gate for the optimizer (cuda_overlap.py), step() enqueues all updates, what reads parameters waits
for them on the device, and the host learns of their arrival when the next backward pass begins, in synchronize() or in
state_dict().

All of this is in the way of the thread that launches a model's kernels: what a bucket needs is worked out once, and
kept until DDP makes other buckets.
"""

import contextlib
import functools
import threading
import weakref

import torch

from paceline._torch.bucket_order import BucketOrder
from paceline._torch.carriers import beside_modes
from paceline._torch.module_reads import ModuleReads
from paceline._torch.pending_gradient import PendingGradient
from paceline._torch.residuals import ResidualSteps, has_stepped
from paceline.errors import PacelineError, UnsupportedError

_live = weakref.WeakSet()
#: An update must not become part of a compiled forward pass.
_eager = getattr(torch, "_disable_dynamo", lambda function: function)


def gradients_of(bucket):
    """(parameter, view of its gradient) for all in a bucket.

    A gradient lies in the bucket as its parameter lies in memory: DDP copies it there by these strides (a convolution's
    weight may be channels_last). bucket.gradients() takes all of them for contiguous.
    """
    buffer, at = bucket.buffer(), bucket.buffer().storage_offset()
    for parameter in bucket.parameters():
        strides = parameter.stride() if _dense(parameter) else _contiguous_strides(parameter.shape)
        if parameter.is_complex() and not buffer.is_complex():  # newer torch puts pairs of real numbers there
            pairs = buffer.as_strided((*parameter.shape, 2), (*(2 * stride for stride in strides), 1), at)
            yield parameter, torch.view_as_complex(pairs)
            at += 2 * parameter.numel()
        else:
            yield parameter, buffer.as_strided(parameter.shape, strides, at)
            at += parameter.numel()


def _dense(tensor):
    """Whether its elements fill a piece of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


class Flight:
    """One bucket: its parameters with views of their gradients, and, from pass to pass, what is to become of them.

    parts: [(first element, elements)] that are sent apart. calls: the carrier's. future: complete, for DDP. owned, by
    the optimizer's id: [(parameter, gradient, stand-in)]; foreign: [(parameter, gradient)] that no optimizer of ours
    updates; see Overlap._divide().

    operation: what the carrier calls the part sent last, None until one is. arrived: the host knows that all have.
    updates: asked for and not made. changed: parameters that updates have changed and nobody has asked for since.
    """

    __slots__ = (
        "arrived",
        "buffer",
        "calls",
        "changed",
        "foreign",
        "future",
        "gradients",
        "index",
        "layout",
        "operation",
        "owned",
        "owners",
        "parts",
        "pointer",
        "travels",
        "unsent",
        "updated",
        "updates",
    )

    def __init__(self, bucket, carrier):
        self.index = bucket.index()
        self.buffer = bucket.buffer()
        self.pointer = self.buffer.data_ptr()
        self.layout = carrier.layout(bucket)
        self.parts = carrier.parts(self)
        self.travels = carrier.carries(self.buffer)
        self.future = carrier.completed(self.buffer)
        self.gradients = list(gradients_of(bucket))
        self.calls = {}
        self.owned = None
        self.begin()

    def is_of(self, buffer):
        return self.pointer == buffer.data_ptr() and self.buffer.numel() == buffer.numel()

    def begin(self):
        """Of a pass."""
        self.unsent = len(self.parts)
        self.operation = None
        self.arrived = False
        self.updates = []
        self.changed = []
        self.updated = None  # the carrier's: when the updates are through


class Overlap:
    """One DDP model's. carrier: how buckets travel (carriers.py); names: of parameters, by id, for messages."""

    def __init__(self, ddp, carrier, names):
        self.carrier = carrier
        self.error = None
        self.taken = 0  # buckets so far
        self._passes = 0
        self.order = BucketOrder(carrier)
        self._names = names
        self._views = ddp.gradient_as_bucket_view
        self._owners = {}
        self._stand_ins = {}
        self._known = {}  # flights by number
        self._flights = []  # of the pass
        self._sent = []  # of those, in the order in which they were submitted
        self._gated = False  # updates that were asked for are on the device's streams, behind a gate
        self._under_way = 0
        self._finite = True
        self._stepped = []
        self._lock = threading.RLock()
        self.reads = ModuleReads(ddp.module, self.want, self.finish_updates)
        ddp.register_forward_pre_hook(functools.partial(_before_forward, self))
        ddp.register_forward_hook(functools.partial(_after_forward, self))
        unused = ddp.find_unused_parameters or getattr(ddp, "static_graph", False)
        if not unused and hasattr(ddp.reducer, "_set_optimizer_in_backward"):
            ddp.reducer._set_optimizer_in_backward()  # DDP need not copy buckets that are under way to .grad
        _live.add(self)
        # The network writes to buckets until they have arrived, also when nobody holds the model any more.
        weakref.finalize(ddp, self.end).atexit = False

    def own(self, optimizer, parameters):
        """`optimizer` updates these parameters from now on, and no others."""
        for known in [known for known, owner in self._owners.items() if owner() is optimizer]:
            del self._owners[known]
        for parameter in parameters:
            self._owners[id(parameter)] = weakref.ref(optimizer)
        for flight in self._known.values():
            flight.owned = None
        for flight in self._flights:  # whose step may be yet to come
            self._divide(flight)
            left = [(p, g) for p, g in flight.foreign if self.pending(p)]
            if left:
                self._arrive(flight)
                self._hand_out(flight, left)

    # --- the backward pass ------------------------------------------------------------------------------------------

    def take(self, bucket):
        """The hook: sends the bucket, or holds it back for its turn. Returns a future that is complete."""
        index, last, buffer = bucket.index(), bucket.is_last(), bucket.buffer()
        if index == 0:
            self.settle()  # what a backward pass that raised has left behind
            if self.carrier.other_buckets():
                self._known.clear()
            self.order.begin()
            self._passes += 1
        if last:
            self._when_backward_ends(self._backward_ended)
        if buffer.layout != torch.strided:
            return self.carrier.average_as_torch_does(buffer)  # DDP waits for it
        self.taken += 1
        flight = self._known.get(index)
        if flight is None or not flight.is_of(buffer):
            flight = self._known[index] = Flight(bucket, self.carrier)
        else:
            flight.begin()
        self._flights.append(flight)
        if flight.travels:
            self.order.ready(flight)
        else:
            self.carrier.average_in_place(flight.buffer)
            flight.arrived = True
        for one, part in self.order.to_send(last):
            self._send(one, part)
        return flight.future

    def _send(self, flight, part):
        ResidualSteps.submitted(self.carrier.steps, False, self.carrier.model)
        self._under_way += 1
        try:
            flight.operation = self.carrier.submit(flight, part)
        except BaseException:
            self._under_way -= 1
            ResidualSteps.ended(self.carrier.steps, True, 1, self.carrier.model)
            raise
        flight.unsent -= 1
        if not flight.unsent:
            self._sent.append(flight)

    def _when_backward_ends(self, action):
        """After DDP's own end of the pass, which is queued behind what its hooks queue."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(action))

    def _backward_ended(self):
        for flight in self._flights:
            self._divide(flight)
            for known in flight.owned.values():
                for parameter, _, stand_in in known:
                    if parameter.grad is not None:  # else it is unused on every rank
                        parameter.grad = stand_in
            foreign = [(p, g) for p, g in flight.foreign if p.grad is not None]
            if foreign:  # an optimizer that is none of ours steps next
                self._arrive(flight)
                self._hand_out(flight, foreign)

    def _divide(self, flight):
        """Whose its parameters are; kept until own() is told of others, or an optimizer is gone."""
        if flight.owned is not None and all(owner() is not None for owner in flight.owners):
            return
        flight.owned, flight.owners, flight.foreign = {}, set(), []
        for parameter, gradient in flight.gradients:
            owner = self._owner(parameter)
            if owner is None:
                flight.foreign.append((parameter, gradient))
                continue
            flight.owners.add(self._owners[id(parameter)])
            known = flight.owned.setdefault(id(owner), [])
            known.append((parameter, gradient, self._stand_in(parameter)))

    def _owner(self, parameter):
        owner = self._owners.get(id(parameter))
        return None if owner is None else owner()

    def _stand_in(self, parameter):
        found = self._stand_ins.get(id(parameter))
        if found is None:
            name = self._names.get(id(parameter), "?")
            found = self._stand_ins[id(parameter)] = PendingGradient.of(parameter, name, weakref.ref(self))
        return found

    def in_hand(self, parameter):
        """The parameter's .grad, waited for: a backward pass without communication adds to it."""
        for flight in self._flights:
            found = [(p, g) for p, g in flight.gradients if p is parameter]
            if found:
                self._arrive(flight)
                self._hand_out(flight, found)
        return parameter.grad

    def _hand_out(self, flight, pairs):
        """These gradients are in hand from now on, on the stream that asks."""
        self.carrier.use_gradients(flight)
        for parameter, gradient in pairs:
            parameter.grad = self._for_the_script(gradient)

    def _for_the_script(self, gradient):
        """What DDP would have put into .grad: the bucket's own memory only where the script asked for that."""
        with torch.inference_mode(False), beside_modes():  # a read may come from anywhere
            return gradient if self._views else gradient.clone()

    # --- the optimizer's step -----------------------------------------------------------------------------------------

    def pending(self, parameter):
        """Whether the parameter's .grad stands for one under way."""
        gradient = parameter.grad
        return gradient is not None and gradient is self._stand_ins.get(id(parameter))

    def request(self, optimizer, update, kind=None):
        """The optimizer steps: update([(parameter, gradient), …], gate) is called for each bucket, in its time.

        kind: the class that the optimizer is of, where it was made another. gate: see Carrier.read_gate().
        """
        self._raise_error()
        self.carrier.before_step(optimizer)
        if not self._flights:  # settled before, by another forward pass
            has_stepped(optimizer, [self.carrier.steps])
        if any(flight.owned and flight.owned.get(id(optimizer)) for flight in self._flights) and not any(
            stepped is optimizer for stepped in self._stepped
        ):
            self._stepped.append(optimizer)  # also where all its gradients were in hand before: clipping
        found = [(flight, self._pending_of(flight, optimizer)) for flight in self._flights]
        found = [(flight, chosen) for flight, chosen in found if chosen]
        if not found:
            return
        others = any(flight.updates for flight, _ in found)  # which wait for arrival, and come first
        gate = None if others else self.carrier.gate(optimizer, kind)
        self.carrier.requested()
        asked = functools.partial(self._ask, update, gate)
        with self._lock:
            for flight, chosen in found:
                flight.updates.append((asked, chosen))
                self.reads.expect([parameter for parameter, _ in chosen], flight)
            if gate is None:
                self._update_what_is_there()
            else:
                self._gated = True
                flights = {flight for flight, _ in found}
                sent = [flight for flight in self._sent if flight in flights]  # as they will arrive
                there = [*flights.difference(sent)]  # nothing of them travels
                groups = [there]
                for flight in sent:
                    # One update each costs the host time that small layers do not give back.
                    if self.carrier.there(flight.operation):
                        there.append(flight)
                    else:
                        groups.append([flight])
                self._update_all(groups)

    def _ask(self, update, gate, chosen):
        update(chosen, gate=None if gate is None else self.carrier.read_gate(gate))

    def _pending_of(self, flight, optimizer):
        known = () if flight.owned is None else flight.owned.get(id(optimizer), ())
        return [(p, g) for p, g, stand_in in known if p.grad is stand_in]

    def gradients_in_hand(self, optimizer):
        """Waits for the optimizer's gradients: requested updates are made, the others' .grad are real then."""
        self.finish_updates()
        for flight in self._flights:
            chosen = self._pending_of(flight, optimizer)
            if chosen:
                self._arrive(flight)
                self._hand_out(flight, chosen)

    def settle(self):
        """Waits for everything under way and carries it out; afterwards buckets may be written again."""
        if not self._flights:
            return
        self.finish_updates()
        for flight in self._flights:
            if flight.operation is None and not flight.arrived:
                continue  # of a backward pass that raised: never sent
            self._arrive(flight)
            left = [(p, g) for p, g in flight.gradients if self.pending(p)]
            if left:
                self._hand_out(flight, left)
            elif flight.updated is None:
                self.carrier.use_gradients(flight)  # the next backward pass writes to the bucket
        self._flights, self._sent, self._gated = [], [], False
        stepped, self._stepped = self._stepped, []
        for optimizer in stepped:
            self.carrier.steps.optimizer_stepped(optimizer)

    # --- reads --------------------------------------------------------------------------------------------------------

    @_eager
    def want(self, parameter):
        """The parameter is about to be read, by what the current stream does next."""
        with self._lock:
            flight = self.reads.pending.get(id(parameter))
            if flight is None:
                return
            self._raise_error()
            self.order.wanted()
            if flight.updates and not flight.arrived and not self.carrier.there(flight.operation):
                self._update_meanwhile(flight)
            self._make_usable(flight)
            self.order.usable(flight)

    @_eager
    def finish_updates(self):
        """Carries out all updates that were asked for, and waits until what they need has arrived."""
        self._raise_error()
        with self._lock:
            for flight in self._flights:
                if self._gated and flight.operation is not None:
                    self._arrive(flight)
                if flight.updates or flight.changed:
                    self._make_usable(flight)

    def _use_all_updates(self):
        """What is computed from here on may read what updates on the device change, and write to all buckets."""
        with self._lock:
            for flight in self._flights:
                if flight.changed:
                    self._make_usable(flight)
                elif flight.updated is None:
                    self.carrier.use_gradients(flight)

    def _make_usable(self, flight):
        if flight.updates:
            self._arrive(flight)
            self._update_all([[flight]])
        self.carrier.use_updates(flight)
        changed, flight.changed = flight.changed, []
        self.reads.forget([parameter for parameter, _ in changed])
        left = [(p, g) for p, g in changed if p.grad is not None and self.pending(p)]
        if left:
            with self.carrier.at_home():
                for parameter, gradient in left:
                    parameter.grad = self._for_the_script(gradient)

    def _update_what_is_there(self, until=None):
        """Carries out updates whose gradients have arrived; stops once `until` has."""
        for flight in reversed(self._flights):
            if until is not None and self.carrier.there(until.operation):
                return
            if flight.updates and (flight.arrived or self.carrier.there(flight.operation)):
                self._arrive(flight)
                self._update_all([[flight]])

    def _update_meanwhile(self, wanted):
        """Carries out updates rather than wait idly for `wanted`, and ends when it has arrived."""
        if not self.carrier.in_order:
            self._update_what_is_there(until=wanted)
            return
        for flight in self._sent:  # each comes before `wanted`, so to wait for it costs nothing
            if flight is wanted or self.carrier.there(wanted.operation):
                return
            if flight.updates:
                self._arrive(flight)
                self._update_all([[flight]])

    def _update_all(self, groups):
        """Makes the updates that groups of flights have asked for, or puts them on the device's streams.

        What one step() asked of a group is one update.
        """
        with self.carrier.updating():
            for group in groups:
                asking = [flight for flight in group if flight.updates]
                asked = {}
                for flight in asking:
                    self.carrier.before_update(flight)
                    for update, chosen in flight.updates:
                        asked.setdefault(update, []).extend(chosen)
                        flight.changed += chosen
                    flight.updates = []
                for update, chosen in asked.items():
                    update(chosen)
                if asking:
                    self.carrier.after_update(asking)

    def _arrive(self, flight):
        """Waits for the bucket. What fails stays failed: every later wait raises it again."""
        if flight.arrived:
            return
        self._raise_error()
        try:
            finite = self.carrier.wait(flight.operation)
        except PacelineError as error:
            self.error = error
            self._ended()
            raise
        flight.arrived = True
        self._finite = self._finite and finite
        if self._under_way and all(one.arrived for one in self._flights if one.operation is not None):
            self._ended()

    def _ended(self):
        count, self._under_way = self._under_way, 0
        finite, self._finite = self._finite, True
        ResidualSteps.ended(self.carrier.steps, finite, count, self.carrier.model)

    def _raise_error(self):
        if self.error is not None:
            raise self.error

    # --- DDP's forward pass -----------------------------------------------------------------------------------------

    @_eager
    def before_forward(self):
        self._raise_error()
        if self._views and self._passes == 1:
            self.settle()  # DDP makes other buckets now, from what .grad holds
        self.reads.before_model()

    @_eager
    def after_forward(self):
        if torch.is_grad_enabled():
            if self._gated and self._all_have_stepped():
                self._use_all_updates()  # the rest of settle() as the next backward pass begins: no wait of the host
            else:
                self.settle()

    def _all_have_stepped(self):
        """Whether all gradients under way have been asked for, and all updates are on the device's streams."""
        stepped = {id(optimizer) for optimizer in self._stepped}
        return all(
            flight.owned is not None and flight.owned.keys() <= stepped and not flight.updates
            for flight in self._flights
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self):
        """Carries out what is under way and lets go of the modules. Returns an error that nobody has seen, or None."""
        known = self.error
        with contextlib.suppress(PacelineError):
            self.settle()
        for flight in self._flights:
            for parameter, _ in flight.gradients:
                if self.pending(parameter):
                    parameter.grad = None
        self._flights, self._sent, self._gated = [], [], False
        self._known.clear()
        self.reads.pending.clear()
        self.reads.stop()
        _live.discard(self)
        return self.error if known is None else None

    def __reduce__(self):
        return _NotThere, ()  # a copy of the model is not overlapped


class _NotThere:
    """What copies of a model have in an Overlap's place."""

    def before_forward(self):
        pass

    after_forward = before_forward


def _before_forward(overlap, _ddp, _inputs):
    overlap.before_forward()


def _after_forward(overlap, _ddp, _inputs, _output):
    overlap.after_forward()


def end_all(process_group=None):
    """The communicators of a process group (None: of all) are about to end. Returns the errors that nobody has seen."""
    over = [one for one in list(_live) if process_group is None or one.carrier.process_group is process_group]
    return [error for error in (one.end() for one in over) if error is not None]


def refuse_join():
    raise UnsupportedError(
        'DistributedDataParallel.join() with overlap="forward": a rank without inputs takes part in no update; give '
        "all ranks the same number of steps, or leave overlap out"
    )


def refuse_hook():
    raise UnsupportedError(
        'overlap="forward" and a comm hook of the script\'s own (register_comm_hook) exclude each other'
    )
