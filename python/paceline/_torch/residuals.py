"""Residuals of top-k: when a step's are kept, taken back and rescaled; checkpoints.

A step is what lies between two steps of the model's optimizer, or, where no torch optimizer is seen stepping, one
backward pass with communication. Its residuals are kept when the optimizer has stepped (or the next backward pass
begins, or a checkpoint reads them); they return to their values before it when an Inf or NaN was seen, by top-k
itself or by GradScaler, because the gradients that travelled are then dropped.
"""

import weakref

import torch
import torch.distributed as dist

from paceline import _state
from paceline import communicator as core
from paceline.errors import InvalidArgumentError

_steps = weakref.WeakKeyDictionary()


def remember(communicator, steps):
    """Steps of another kind than ResidualSteps.of() makes."""
    _steps[communicator] = steps


class ResidualSteps:
    """The step under way on one communicator; does nothing unless top-k is on."""

    def __init__(self, communicator):
        self._communicator = weakref.ref(communicator)
        self.enabled = core.setting("codec", _state.face) == "topk"
        self._running = 0
        self._finite = True
        self._pending = False
        self._by_optimizer = False
        #: By id, of models that live: an id is given again once its parameter is gone.
        self.parameters = weakref.WeakValueDictionary()
        self.overlaps = weakref.WeakSet()  # models whose last step may still be under way
        self.dropped = []  # keys of parameters of models that are gone, by whichever thread collected them

    @classmethod
    def of(cls, communicator):
        if communicator not in _steps:
            _steps[communicator] = cls(communicator)
        return _steps[communicator]

    @staticmethod
    def every():
        return [s for s in _steps.values() if s.enabled and s._alive() is not None]

    @staticmethod
    def of_optimizer(optimizer):
        """Those that have parameters of an optimizer; all, where it is not known whose it has."""
        steps = ResidualSteps.every()
        return [one for one in steps if one.has_parameters_of(optimizer)] or steps

    def has_parameters_of(self, optimizer):
        firsts = (id(group["params"][0]) for group in optimizer.param_groups if group["params"])
        return any(first in self.parameters for first in firsts)

    def submitted(self, first):
        """An operation is about to be submitted; `first`: of its model's backward pass."""
        if not self.enabled:
            return
        if first:
            for one in list(self.overlaps):
                one.settle()
        if first and self._running == 0 and not self._by_optimizer:
            self.commit()
        self._running += 1

    def optimizer_stepped(self, optimizer):
        """Called after every torch optimizer's step; ends the step where the parameters are ours."""
        if self.has_parameters_of(optimizer):
            self._by_optimizer = True
            self.commit()

    def ended(self, finite, operations=1):
        """Operations have ended. The last one of the backward pass settles the step when it was not finite."""
        if not self.enabled:
            return
        self._running -= operations
        self._finite = self._finite and finite
        self._pending = True
        if self._running == 0 and not self._finite:
            self.rollback()

    def commit(self):
        if self._pending and self._running == 0:
            self._pending, self._finite = False, True
            self._alive().commit_residuals()

    def rollback(self):
        if self._pending and self._running == 0:
            self._pending, self._finite = False, True
            self._alive().rollback_residuals()

    def forget_dropped(self):
        """Frees the residuals of models that are gone, as far as no operation may still write to them."""
        keys, self.dropped = self.dropped, []
        if not keys or self._alive() is None:
            return
        for key in keys:
            try:
                self._alive().write_residual(key, None, 0)
            except InvalidArgumentError:  # amid a step
                self.dropped.append(key)

    def scale(self, factor):
        self.commit()
        self._alive().scale_residuals(factor)

    def _alive(self):
        communicator = self._communicator()
        return None if communicator is None or communicator.closed else communicator


def read_state(attachment, all_ranks):
    """See paceline.torch.residual_state_dict."""
    endpoint = attachment.endpoint
    if attachment.overlap is not None:
        attachment.overlap.settle()
    endpoint.steps.commit()
    residuals = {}
    for name, parameter, key in attachment.keyed_parameters():
        residual = torch.zeros(parameter.shape, dtype=torch.float32)
        endpoint.communicator.read_residual(key, residual.data_ptr(), residual.numel())
        residuals[name] = residual
    head = {"world_size": endpoint.size, "unit": endpoint.residual_unit}
    if not all_ranks:
        return {**head, "rank": endpoint.rank, "residuals": residuals}
    gathered = [None] * endpoint.size
    dist.all_gather_object(gathered, residuals, group=attachment.process_group())
    return {**head, "all_ranks": gathered}


def write_state(attachment, state):
    """See paceline.torch.load_residual_state_dict."""
    endpoint = attachment.endpoint
    unit = endpoint.residual_unit
    if state.get("unit", unit) != unit:
        raise InvalidArgumentError(
            f"the residual state is in units of the {state['unit']}, those of this model are in units of the {unit}: "
            "one of the two models is on the CPU; load it where it was saved, or begin without residuals"
        )
    residuals = _for_rank(state, endpoint.rank, endpoint.size, unit)
    wanted = {name: (parameter, key) for name, parameter, key in attachment.keyed_parameters()}
    if set(residuals) != set(wanted):
        odd = sorted(set(residuals) ^ set(wanted))
        raise InvalidArgumentError(
            f"residual state and model differ in the parameters {', '.join(odd[:5])}; load the state of this model"
        )
    for name, residual in residuals.items():
        parameter, _ = wanted[name]
        if residual.shape != parameter.shape:
            raise InvalidArgumentError(
                f"residual of '{name}' has shape {list(residual.shape)}, the parameter {list(parameter.shape)}"
            )
    if attachment.overlap is not None:
        attachment.overlap.settle()
    endpoint.steps.commit()
    for name, residual in residuals.items():
        dense = residual.detach().to(device="cpu", dtype=torch.float32).contiguous()
        endpoint.communicator.write_residual(wanted[name][1], dense.data_ptr(), dense.numel())


def _for_rank(state, rank, size, unit):
    """This rank's residuals. After a resize what is owed goes to other ranks; the next step's average stays the same.

    Where residuals are in units of a rank's gradient (models on the CPU), every rank takes the mean. Those of the path
    for CUDA tensors are in units of the average, and each element is one rank's: the sum is dealt out.
    """
    if "all_ranks" in state:
        ranks = state["all_ranks"]
        if len(ranks) == size:
            return ranks[rank]
        sums = {name: sum(r[name] for r in ranks) for name in ranks[0]}
        if unit == "gradient":
            return {name: total / len(ranks) for name, total in sums.items()}
        return {name: _share_of(total, rank, size) for name, total in sums.items()}
    if state.get("world_size") != size or state.get("rank") != rank:
        raise InvalidArgumentError(
            f"residual state of rank {state.get('rank')} of {state.get('world_size')} can't be loaded on rank {rank} "
            f"of {size}; every rank loads its own, or save with residual_state_dict(model, all_ranks=True)"
        )
    return state["residuals"]


def _share_of(total, rank, size):
    """A rank's even share of the elements; 0 elsewhere."""
    share = torch.zeros_like(total)
    first, last = total.numel() * rank // size, total.numel() * (rank + 1) // size
    share.view(-1)[first:last] = total.reshape(-1)[first:last]
    return share
