"""The gradients of one DDP model under way, and the updates that wait for them.

The hook hands a bucket over and gives DDP a completed future, so backward() ends without a wait. step() notes which
updates it wants, with its hyperparameters of that moment. An update is carried out by the thread that trains, once its
gradient has arrived: in step(), or when the forward pass (or anything else that reads through modules) comes to one
of its parameters. So nothing changes a parameter behind the script's back, and after a fault no parameter has changed
whose gradient had not arrived.
"""

import contextlib
import threading
import weakref

import torch

from paceline._torch import bucket_order
from paceline._torch.module_reads import ModuleReads
from paceline._torch.pending_gradient import PendingGradient
from paceline._torch.residuals import ResidualSteps
from paceline.errors import PacelineError, UnsupportedError

_live = weakref.WeakSet()


class Flight:
    """One bucket: its parameters with views of their gradients, and what is to become of them."""

    __slots__ = ("arrived", "buffer", "gradients", "handle", "index", "layout", "updates")

    def __init__(self, bucket, layout):
        self.index = bucket.index()
        self.buffer = bucket.buffer()
        self.layout = layout
        self.gradients = list(zip(bucket.parameters(), bucket.gradients()))
        self.handle = None
        self.arrived = False
        self.updates = []


class Overlap:
    """One DDP model's. carrier: how buckets travel (carriers.py, cuda_overlap.py)."""

    def __init__(self, ddp, carrier, names):
        self.carrier = carrier
        self.error = None
        self._names = names
        self._ddp = weakref.ref(ddp)
        self._owners = {}
        self._placeholders = {}
        self._flights = []
        self._open = 0
        self._finite = True
        self._stepped = []
        self._lock = threading.RLock()
        self._order = bucket_order.Learned(carrier)
        self.reads = ModuleReads(ddp.module, self.want, self.finish_updates)
        ddp.register_forward_pre_hook(self._before_forward)
        ddp.register_forward_hook(self._after_forward)
        unused = ddp.find_unused_parameters or getattr(ddp, "static_graph", False)
        if not unused and hasattr(ddp.reducer, "_set_optimizer_in_backward"):
            ddp.reducer._set_optimizer_in_backward()  # DDP need not copy buckets that are under way to .grad
        _live.add(self)

    def own(self, optimizer, parameters):
        """`optimizer` updates these parameters from now on."""
        for parameter in parameters:
            self._owners[id(parameter)] = optimizer

    # --- the backward pass ------------------------------------------------------------------------------------------

    def take(self, bucket):
        """The hook: submits the bucket, or holds it back for its turn. Returns a future that is complete."""
        if bucket.index() == 0:
            self.settle()  # a backward pass that raised, or one without a forward pass of this model
            self._order.begin()
        if bucket.is_last():
            self._when_backward_ends(self._backward_ended)
        if bucket.buffer().layout != torch.strided:
            return self.carrier.average_as_torch_does(bucket.buffer())  # DDP waits for it
        flight = Flight(bucket, self.carrier.layout(bucket))
        self._flights.append(flight)
        self._order.ready(flight)
        for one in self._order.to_send(bucket.is_last()):
            self._send(one)
        return self.carrier.completed(flight.buffer)

    def _send(self, flight):
        ResidualSteps.submitted(self.carrier.steps, self._open == 0)
        self._open += 1
        try:
            flight.handle = self.carrier.submit(flight)
        except BaseException:
            self._open -= 1
            ResidualSteps.ended(self.carrier.steps, True)
            raise

    def _when_backward_ends(self, action):
        """After DDP's own end of the pass, which is queued behind what its hooks queue."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(action))

    def _backward_ended(self):
        for flight in self._flights:
            foreign = False
            for parameter, _ in flight.gradients:
                if parameter.grad is None:
                    continue  # unused on every rank
                if id(parameter) in self._owners:
                    parameter.grad = self._placeholder(parameter)
                else:
                    foreign = True
            if foreign:  # an optimizer that is none of ours steps next
                self._arrive(flight)
                for parameter, gradient in flight.gradients:
                    if parameter.grad is not None and id(parameter) not in self._owners:
                        parameter.grad = gradient

    def _placeholder(self, parameter):
        found = self._placeholders.get(id(parameter))
        if found is None:
            name = self._names.get(id(parameter), "?")
            found = self._placeholders[id(parameter)] = PendingGradient.of(parameter, name)
        return found

    # --- the optimizer's step -----------------------------------------------------------------------------------------

    def pending(self, parameter):
        """Whether the parameter's .grad stands for one under way."""
        gradient = parameter.grad
        return gradient is not None and gradient is self._placeholders.get(id(parameter))

    def request(self, optimizer, update):
        """The optimizer steps: update([(parameter, gradient), …]) is called for each bucket once it has arrived."""
        self._raise_error()
        mine = False
        for flight in self._flights:
            chosen = [(p, g) for p, g in flight.gradients if self._owners.get(id(p)) is optimizer and self.pending(p)]
            if not chosen:
                continue
            mine = True
            flight.updates.append((update, chosen))
            for parameter, _ in chosen:
                self.reads.pending[id(parameter)] = flight
        if mine:
            self._stepped.append(optimizer)
        with self._lock:
            self._update_what_is_there()

    def gradients_in_hand(self, optimizer):
        """Waits for the optimizer's gradients: requested updates are made, the others' .grad are real then."""
        self._raise_error()
        self.finish_updates()
        for flight in self._flights:
            chosen = [(p, g) for p, g in flight.gradients if self._owners.get(id(p)) is optimizer and self.pending(p)]
            if chosen:
                self._arrive(flight)
                self.carrier.use_gradients()
                for parameter, gradient in chosen:
                    parameter.grad = gradient

    def settle(self):
        """Waits for everything under way and carries it out; afterwards buckets may be written again."""
        if not self._flights:
            return
        self.finish_updates()
        for flight in self._flights:
            if flight.handle is None:
                continue  # of a backward pass that raised: never sent
            self._arrive(flight)
            for parameter, gradient in flight.gradients:
                if self.pending(parameter):
                    self.carrier.use_gradients()
                    parameter.grad = gradient
        self._flights = []
        stepped, self._stepped = self._stepped, []
        for optimizer in stepped:
            self.carrier.steps.optimizer_stepped(optimizer)

    # --- reads --------------------------------------------------------------------------------------------------------

    def want(self, parameter):
        """The parameter is about to be read."""
        with self._lock:
            flight = self.reads.pending.get(id(parameter))
            if flight is None:
                return
            self._raise_error()
            self._order.wanted(flight)
            if not flight.arrived and not self.carrier.there(flight.handle):
                self._update_what_is_there(until=flight)
            if flight.updates:
                self._arrive(flight)
                self._update(flight)

    def _update_what_is_there(self, until=None):
        """Carries out updates whose gradients have arrived; stops once `until` has."""
        for flight in reversed(self._flights):
            if until is not None and self.carrier.there(until.handle):
                return
            if flight.updates and (flight.arrived or self.carrier.there(flight.handle)):
                self._arrive(flight)
                self._update(flight)

    def finish_updates(self):
        """Carries out all updates that were asked for."""
        with self._lock:
            for flight in self._flights:
                if flight.updates:
                    self._raise_error()
                    self._arrive(flight)
                    self._update(flight)

    def _update(self, flight):
        updates, flight.updates = flight.updates, []
        with self.carrier.updating(flight):
            for update, chosen in updates:
                update(chosen)
                for parameter, gradient in chosen:
                    self.reads.pending.pop(id(parameter), None)
                    if self.pending(parameter):
                        parameter.grad = gradient

    def _arrive(self, flight):
        """Waits for the bucket. What fails stays failed: every later wait raises it again."""
        if flight.arrived:
            return
        self._raise_error()
        try:
            finite = self.carrier.wait(flight.handle)
        except PacelineError as error:
            self.error = error
            self._ended()
            raise
        flight.arrived = True
        self._finite = self._finite and finite
        self._order.arrived(flight)
        if self._open and all(one.arrived for one in self._flights):
            self._ended()

    def _ended(self):
        count, self._open = self._open, 0
        finite, self._finite = self._finite, True
        ResidualSteps.ended(self.carrier.steps, finite, count)

    def _raise_error(self):
        if self.error is not None:
            raise self.error

    # --- DDP's forward pass -----------------------------------------------------------------------------------------

    def _before_forward(self, _ddp, _inputs):
        self._raise_error()
        self.reads.before_model()

    def _after_forward(self, _ddp, _inputs, _output):
        if torch.is_grad_enabled():
            self.settle()

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self):
        """Carries out what is under way, then lets go of the modules. Returns the error that was met, or None."""
        known = self.error
        with contextlib.suppress(PacelineError):
            self.settle()
        self._flights = []
        self.reads.pending.clear()
        self.reads.stop()
        _live.discard(self)
        return self.error if known is None else None

    def __reduce__(self):
        return _NotThere, ()  # a copy of the model is not overlapped


class _NotThere:
    """What copies of a model have in an Overlap's place."""

    def _before_forward(self, _ddp, _inputs):
        pass

    def _after_forward(self, _ddp, _inputs, _output):
        pass


def every():
    return list(_live)


def refuse_join():
    raise UnsupportedError(
        'DistributedDataParallel.join() with overlap="forward": a rank without inputs takes part in no update; give '
        "all ranks the same number of steps, or leave overlap out"
    )
