"""The step under way on a CUDA path: what was submitted, when it has arrived, what becomes of its residuals.

Kernels of the optimizer are enqueued behind the stream's wait for the network. So that none runs on what a fault
left half-received, the host waits for arrival before every optimizer's step; nowhere else.
"""

import weakref

from paceline._torch import aborts, residuals
from paceline.errors import AbortedError, InvalidArgumentError, PacelineError, PeerLostError
from paceline.errors import TimeoutError as PacelineTimeoutError

_FATAL = (AbortedError, PeerLostError, PacelineTimeoutError)
_live = weakref.WeakSet()


class CudaSteps(residuals.ResidualSteps):
    """ResidualSteps whose operations end when they are waited for."""

    def __init__(self, endpoint, enabled):
        super().__init__(endpoint.communicator)
        self.enabled = enabled
        self._endpoint = weakref.ref(endpoint)
        self._under_way = 0
        self._models = set()
        self._checked = weakref.WeakSet()
        residuals.remember(endpoint.communicator, self)
        _live.add(self)

    def submitted(self, first, model=0):
        """An operation is about to be submitted; `first`: of this model's backward pass."""
        if first and model in self._models:
            self.arrive()  # no optimizer stepped since the model's last pass: memory is reserved for one
        self._models.add(model)
        super().submitted(first)
        self._under_way += 1

    def not_submitted(self):
        """The operation announced last was refused."""
        self._under_way -= 1
        super().ended(True)

    def arrive(self):
        """Waits until everything submitted has come over the network; raises what failed."""
        count, self._under_way = self._under_way, 0
        self._models.clear()
        if not count:
            return
        try:
            finite = self._communicator().wait_arrival()
        except PacelineError as error:
            super().ended(True, count)
            self.failed(error)
            raise
        super().ended(finite, count)

    def failed(self, error):
        """A wait for arrival has raised."""
        if isinstance(error, _FATAL):
            _abort_torch(self._endpoint())

    def before_step(self, optimizer):
        if self._under_way:
            self.arrive()
        self.check_optimizer(optimizer)

    def commit(self):
        self.arrive()
        super().commit()

    def rollback(self):
        self.arrive()
        super().rollback()

    def forget(self):
        """The communicator is about to be closed."""
        self._under_way = 0
        _live.discard(self)

    def check_optimizer(self, optimizer):
        """Raises InvalidArgumentError where the momentum of this job would be applied twice."""
        endpoint = self._endpoint()
        if endpoint is None or not endpoint.momentum or optimizer in self._checked:
            return
        self._checked.add(optimizer)
        for group in optimizer.param_groups:
            ours = any(id(p) in self.parameters for p in group["params"])
            if ours and group.get("momentum", 0):
                raise InvalidArgumentError(
                    f"PACELINE_TOPK_MOMENTUM={self._endpoint().momentum:g} applies the momentum before the selection, "
                    f"and {type(optimizer).__name__} applies {group['momentum']:g} once more; give it momentum=0"
                )


def watch(steps):
    """steps.before_step(optimizer) is called before every optimizer's step, until unwatch() or its end."""
    _live.add(steps)


def unwatch(steps):
    _live.discard(steps)


def before_optimizer_step(optimizer, _args, _kwargs):
    """torch's hook before every optimizer's step."""
    if hasattr(optimizer, "_paceline_overlaps"):
        return  # each bucket's update waits for its own gradient
    for steps in list(_live):
        steps.before_step(optimizer)


def _abort_torch(endpoint):
    """torch's own NCCL communicators over the lost rank would wait for it."""
    if endpoint is None:
        return
    try:
        backend = endpoint.process_group._get_backend(endpoint.device)
    except (AttributeError, RuntimeError):
        return
    if type(backend).__name__ == "ProcessGroupNCCL":
        aborts.abort(backend)
