"""The step under way on a CUDA path: what was submitted, when it has arrived, what becomes of its residuals.

Kernels of the optimizer are enqueued behind the stream's wait for the network. So that none runs on what a fault
left half-received, the host waits for arrival before every optimizer's step; nowhere else. Fused optimizers are given a
gate instead (gates.py), and what the wait would have settled is settled as the next backward pass begins. No gate
stands for gradients that torch's own group carries (float64, sparse ones): the host waits for those on the device.
"""

import bisect
import functools
import sys
import threading
import time
import weakref

import torch

from paceline._torch import aborts, gates, guard, residuals
from paceline.errors import InvalidArgumentError, PacelineError, UnsupportedError

#: After these the path goes on; all others (a GPU that fails, ranks that disagree, one that is lost …) have ended it.
_REFUSALS = (InvalidArgumentError, UnsupportedError)
_FINISH_SECONDS = 10.0
_NAP_SECONDS = 0.0001
_TURNS = 1024  # are remembered
_live = weakref.WeakSet()


class CudaSteps(residuals.ResidualSteps):
    """ResidualSteps whose operations end when they are waited for."""

    def __init__(self, endpoint, enabled):
        super().__init__(endpoint.communicator)
        self.enabled = enabled
        self.momentum = endpoint.momentum
        self._endpoint = weakref.ref(endpoint)
        self._torch_carries = False  # some of the gradients that the next step applies
        self._under_way = 0
        self._gated = None  # the optimizer that has stepped, or is about to, without a wait
        self._gates = {}
        self._gates_read = {}
        self._submitted = {}  # of those under way, how many, by model
        self._turns = [(0, None)]  # (operation, model): from that operation on it was the model's turn
        self._kept = []  # buckets that nobody else holds, until they have arrived
        self._error = None  # that ended the job
        self._error_lock = threading.Lock()
        self._heard = None  # by the guard, before the script's own thread
        self._checked = weakref.WeakSet()
        residuals.remember(endpoint.communicator, self)
        _live.add(self)

    def submitted(self, first, model):
        """An operation is about to be submitted; `first`: of this model's backward pass."""
        if first:
            self._make_room(model)
            super().submitted(True, model)
        elif self.enabled:  # what super() would do: the hook stands in the way of whoever launches kernels
            self.models[model].running += 1
        self._submitted[model] = self._submitted.get(model, 0) + 1
        self._under_way += 1

    def begins(self, model):
        self._make_room(model)
        return super().begins(model)

    def _make_room(self, model):
        """Memory is reserved for one step; where no optimizer stepped, for one pass of the model."""
        if self._gated is not None or model in self._submitted:
            self.arrive()

    def not_submitted(self, model):
        """The operation announced last was refused."""
        self._under_way -= 1
        self._submitted[model] -= 1
        super().ended(True, 1, model)

    def sent(self, model, operation):
        """The operation is this model's."""
        if self.enabled and self._turns[-1][1] != model:
            self._turns.append((operation, model))
            if len(self._turns) > _TURNS:
                del self._turns[: _TURNS // 2]

    def not_finite(self, finite):
        """The models whose numbers were not, where a wait has said whether all that has arrived is finite."""
        if finite:
            return ()
        operations = self._communicator().take_not_finite()  # also where one model has them all: they are told once
        found = {self._sender_of(operation) for operation in operations}
        if len(self.models) < 2 or not found or not found.issubset(self.models):
            return set(self.models)  # it is not known which
        for model in found:  # those whose end is told later
            self.models[model].finite = False
        return found

    def _sender_of(self, operation):
        """The model whose it is; None where that is too long ago."""
        at = bisect.bisect_left(self._turns, (operation + 1,))
        return self._turns[at - 1][1] if at else None

    def arrive(self):
        """Waits until everything submitted has come over the network; raises what failed."""
        count, self._under_way = self._under_way, 0
        gated, self._gated = self._gated, None
        submitted, self._submitted = self._submitted, {}
        self._take_back(gated)
        if not count:
            return
        try:
            finite = self._communicator().wait_arrival()
        except PacelineError as error:
            for model in submitted:
                self.models[model].dropped.clear()  # a path that has failed takes nothing back
            self._have_ended(submitted, ())
            self.failed(error)
            raise
        self._kept = []
        self._have_ended(submitted, self.not_finite(finite) if self.enabled else ())
        if gated is not None and self.enabled:
            super().optimizer_stepped(gated)

    def _have_ended(self, submitted, not_finite):
        for model, count in submitted.items():
            super().ended(model not in not_finite, count, model)

    def keep(self, buffers):
        """Holds buckets that the path may still write to, until all that is under way has arrived."""
        if buffers and self._under_way:
            self._kept.extend(buffers)

    def failed(self, error):
        """A call has raised. Whether this is what ended the job, and torch's own NCCL ends with it now."""
        with self._error_lock:
            if isinstance(error, _REFUSALS) or self._error is not None:
                return False
            self._error = error
        _abort_torch(self._endpoint())
        return True

    def look(self):
        """The guard's, on its thread: a host that waits for torch's NCCL calls nothing of ours, and hears what is lost.

        A look later, for a script that is not held up raises the error by itself.
        """
        endpoint = self._endpoint()
        if endpoint is None or self._error is not None or endpoint.communicator.closed:
            guard.unwatch(self)
            return
        try:
            endpoint.communicator.communicator.check_health()
        except PacelineError as error:
            if self._heard is None:
                self._heard = error
            elif self.failed(error):
                print(f"paceline: on rank {endpoint.rank}: {error}", file=sys.stderr, flush=True)

    def hear(self):
        """What ended the job, for a script's thread that wants to raise it: asked now; torch's NCCL ends with it."""
        endpoint = self._endpoint()
        if self._error is None and endpoint is not None and not endpoint.communicator.closed:
            try:
                endpoint.communicator.communicator.check_health()
            except PacelineError as error:
                self.failed(error)
        return self._error

    def before_step(self, optimizer, alone=False):
        """alone: nothing else is under way that this step could depend on."""
        self.check_optimizer(optimizer)
        if self._error is not None:
            raise self._error  # once more: gradients may be half received
        if not self.under_way:
            return
        if alone and not self._torch_carries and self._gated is None and gates.fits(optimizer):
            self._give_gate(optimizer)
        else:
            self.arrive()
            self.await_torch()

    def torch_carries(self):
        """Gradients of this pass travel by torch's own group, on the stream that an optimizer's step comes behind."""
        self._torch_carries = True

    def await_torch(self):
        """Blocks the host until these are through the current stream; raises what ended the job.

        NCCL's kernels end with garbage once the group is aborted, and that comes after the error is known.
        """
        if not self._torch_carries or _captures():  # a step under capture that is none of ours
            return
        self._torch_carries = False  # another thread's pass may begin meanwhile
        try:
            behind = _behind(self._endpoint().device)
            while not behind.query():
                self._raise_heard()
                time.sleep(_NAP_SECONDS)
            self._raise_heard()
        except BaseException:
            self._torch_carries = True
            raise

    def _raise_heard(self):
        error = self.hear()
        if error is not None:
            raise error

    def gate(self):
        """A tensor on the device: 1 where a fault comes before all submitted so far has arrived. Raises what failed."""
        try:
            address = self._communicator().gate()
        except PacelineError as error:
            self.failed(error)
            raise
        if address not in self._gates:
            self._gates[address] = gates.tensor_at(address, self._endpoint().device)
        return self._gates[address]

    def _give_gate(self, optimizer):
        optimizer.found_inf = self.read_gate(self.gate())
        self._gated = optimizer

    def read_gate(self, gate):
        """What it says when the current stream comes to this, for kernels that are enqueued there next.

        Every block of an optimizer's kernels asks. Of the gate itself they might get two answers, and half a tensor
        would be updated; and its memory is the host's: AdamW of 355 M parameters on an H200 took 3.8 ms so, 2.8
        without a gate.
        """
        if gate.device.type != "cuda":
            return gate
        key = gate.data_ptr(), torch.cuda.current_stream(gate.device).cuda_stream
        if key not in self._gates_read:
            self._gates_read[key] = torch.empty_like(gate)
        return self._gates_read[key].copy_(gate, non_blocking=True)

    def rest(self):
        """The host is ahead: it sleeps while the network takes long, where it would wait inside the driver."""
        try:
            self._communicator().rest()
        except PacelineError as error:
            self.failed(error)
            raise

    @property
    def has_gated(self):
        """Whether all that is under way was sent before a step with a gate."""
        return self._gated is not None

    def _take_back(self, optimizer):
        """What a gate was for has arrived before the optimizer's step has ended: a closure that is called again."""
        given = getattr(optimizer, "found_inf", None)
        if any(given is gate for gate in (*self._gates.values(), *self._gates_read.values())):
            del optimizer.found_inf

    def gates(self, optimizer):
        """Whether this is the optimizer that was given a gate."""
        return optimizer is self._gated and hasattr(optimizer, "found_inf")

    @property
    def under_way(self):
        return self._under_way > 0 or self._torch_carries

    def optimizer_stepped(self, optimizer):
        if optimizer is not self._gated:  # else it is kept when it is known to have arrived
            super().optimizer_stepped(optimizer)

    def _settle(self, steps, keep):
        if any(step.running or step.pending for step in steps):
            self.arrive()
        super()._settle(steps, keep)

    def _scale_some(self, communicator, factor, models):
        communicator.scale_residuals(factor, [key for model in models for key in model.keys])

    def forget(self):
        """The communicator is about to be closed."""
        self._under_way, self._torch_carries = 0, False
        if self._gates:
            _finish(self._endpoint())  # kernels that read the gates end before their memory does
            self._gates.clear()
            self._gates_read.clear()
        guard.unwatch(self)
        _live.discard(self)

    def check_optimizer(self, optimizer):
        """Raises InvalidArgumentError where the momentum of this job would be applied twice."""
        endpoint = self._endpoint()
        if endpoint is None or not self.momentum or optimizer in self._checked:
            return
        self._checked.add(optimizer)
        for group in optimizer.param_groups:
            own = _momentum_of(group)
            if own is not None and any(self.owns(p) for p in group["params"]):
                raise InvalidArgumentError(
                    f"PACELINE_TOPK_MOMENTUM={self.momentum:g} applies the momentum before the selection, "
                    f"and {type(optimizer).__name__} applies {own[0]:g} once more; {own[1]}"
                )

    def refuse_capture(self, optimizer):
        """Raises UnsupportedError where the step under capture updates parameters whose gradients travel here."""
        if any(self.owns(p) for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() is being captured into a CUDA graph: a replay would wait for no "
                "gradient and hear of no lost rank; step outside of the capture"
            )


def _momentum_of(group):
    """(how much momentum a group's optimizer applies, what to do about it); None where it applies none."""
    if group.get("momentum", 0):
        return group["momentum"], "give it momentum=0"
    betas = group.get("betas", ())
    if betas and betas[0]:  # Adam's and its kin's first moment
        return betas[0], "train with SGD and momentum=0, or leave PACELINE_TOPK_MOMENTUM at 0"
    return None


def _captures():
    # Not is_available(), which asks the driver each time.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _behind(device):
    """An event behind all that the current stream holds."""
    return torch.cuda.current_stream(device).record_event()


def _finish(endpoint):
    if endpoint is None or endpoint.device.type != "cuda":
        return
    ended = _behind(endpoint.device)
    until = time.monotonic() + _FINISH_SECONDS
    while not ended.query() and time.monotonic() < until:
        time.sleep(0.0005)


def watch(steps):
    """steps.before_step(optimizer) is called before every optimizer's step, until unwatch() or its end."""
    _live.add(steps)


def unwatch(steps):
    _live.discard(steps)


def before_optimizer_step(optimizer, args, kwargs):
    """torch's hook before every optimizer's step. With a closure: (args, kwargs) with one in its place that waits."""
    ours = [steps for steps in list(_live) if isinstance(steps, CudaSteps)]
    if ours and _captures():
        for steps in ours:
            steps.refuse_capture(optimizer)
    if hasattr(optimizer, "_paceline_overlaps"):
        for steps in ours:
            steps.check_optimizer(optimizer)
        return None  # each bucket's update waits for its own gradient
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _before_kernels(optimizer)
        return None
    for steps in list(_live):
        if not (isinstance(steps, CudaSteps) and steps.has_gated):  # that step's kernels look for themselves
            steps.before_step(optimizer)
    changed = _with_a_wait(optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": changed}
    return (args[0], changed, *args[2:]), kwargs


def _with_a_wait(optimizer, closure):
    """Its backward pass submits, and the optimizer's kernels come right after it."""

    @functools.wraps(closure, updated=())
    def closure_and_wait():
        loss = closure()
        _before_kernels(optimizer)
        return loss

    return closure_and_wait


def _before_kernels(optimizer):
    everyone = list(_live)
    busy = [steps for steps in everyone if steps.under_way]
    for steps in everyone:
        if busy == [steps] and isinstance(steps, CudaSteps):
            steps.before_step(optimizer, alone=True)
        else:
            steps.before_step(optimizer)


def after_optimizer_step(optimizer):
    """torch's hook after every optimizer's step: a gate is for one step."""
    given = [steps for steps in _live if isinstance(steps, CudaSteps) and steps.gates(optimizer)]
    if given:
        del optimizer.found_inf
        given[0].rest()


def _abort_torch(endpoint):
    """torch's own NCCL communicators over the lost rank would wait for it."""
    if endpoint is None:
        return
    try:
        backend = endpoint.process_group._get_backend(endpoint.device)
    except (AttributeError, RuntimeError):
        return
    if type(backend).__name__ == "ProcessGroupNCCL":
        aborts.abort(backend, made_by_torch=True)
