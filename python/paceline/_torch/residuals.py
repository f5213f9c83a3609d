"""Residuals of top-k: when a step's are kept, taken back and rescaled. Checkpoints: residual_state.py.

A step is what lies between two steps of the model's optimizer, or, where no torch optimizer is seen stepping, one
backward pass with communication. Its residuals are kept when the optimizer has stepped (or the next backward pass
begins, or a checkpoint reads them); they return to their values before it when an Inf or NaN was seen, by top-k
itself or by GradScaler, because the gradients that travelled are then dropped.
"""

import contextlib
import itertools
import threading
import weakref

import torch

from paceline import _state
from paceline import communicator as core

_steps = weakref.WeakKeyDictionary()


def remember(communicator, steps):
    """Steps of another kind than ResidualSteps.of() makes."""
    _steps[communicator] = steps


class _Scaler(threading.local):
    #: The optimizers that have stepped inside a GradScaler's step; None outside of one.
    stepped = None


_scaler = _Scaler()


@contextlib.contextmanager
def scaler_decides():
    """Around a GradScaler's step: fused optimizers step there in any case, and their kernels may change nothing.

    Yields the optimizers that stepped; the caller says for each whether its step counts.
    """
    stepped, _scaler.stepped = _scaler.stepped, []
    try:
        yield _scaler.stepped
    finally:
        _scaler.stepped = stepped


def has_stepped(optimizer, steps):
    """An optimizer's step() has returned: ends the step of its models among these ResidualSteps, if it counts."""
    if _scaler.stepped is not None:
        _scaler.stepped.append(optimizer)
        return
    for one in steps:
        one.optimizer_stepped(optimizer)


def rescale(optimizers, factor):
    """The scale of a GradScaler of these optimizers has changed by a factor: so do the residuals of their models, or of
    all where it is not known whose models an optimizer has."""
    found = {one: [one.models_of(optimizer) for optimizer in optimizers] for one in ResidualSteps.every()}
    known = bool(optimizers) and all(any(models) for models in zip(*found.values()))
    for one, models in found.items():
        one.scale(factor, list(dict.fromkeys(itertools.chain(*models))) if known else one._models())


class ModelStep:
    """The step under way of one model."""

    def __init__(self, keyed):
        self.keys = [key for key, _ in keyed]
        self.elements = {key: parameter.numel() for key, parameter in keyed}
        #: By id, of a model that lives: an id is given again once its parameter is gone.
        self.parameters = weakref.WeakValueDictionary((id(parameter), parameter) for _, parameter in keyed)
        self.running = 0  # operations
        self.finite = True
        self.pending = False  # something has ended that is neither kept nor taken back
        self.by_optimizer = False
        self.dropped = set()  # keys whose residuals return to what they were before a pass that is to end
        self.before = {}  # what was kept before the step, by key, where a pass of it was kept on its own


class ResidualSteps:
    """The steps under way on one communicator, of each of its models; does nothing unless top-k is on.

    Models step at times of their own (two networks that train each other, a scaler that skips one of two optimizers),
    and so what one has sent is settled by its keys, amid the others' steps.
    """

    def __init__(self, communicator):
        self._communicator = weakref.ref(communicator)
        self.enabled = core.setting("codec", _state.face) == "topk"
        self.momentum = 0.0  # momentum correction's; where there is one, velocities are kept beside residuals
        self.models = {}  # by number
        self.dropped = []  # models that are gone, by whichever thread collected them

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
        return [one for one in steps if one.models_of(optimizer)] or steps

    def add(self, model, keyed):
        """A model's number and its parameters: (residual key, parameter)."""
        self._forget_dropped()
        self.models[model] = ModelStep(keyed)

    def owns(self, parameter):
        return any(id(parameter) in model.parameters for model in self._models())

    def models_of(self, optimizer):
        """Those of which an optimizer updates parameters."""
        models = self._models()
        if len(models) == 1:  # asked at every step: a parameter of each group is enough
            ids = {id(group["params"][0]) for group in optimizer.param_groups if group["params"]}
        else:
            ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [model for model in models if not ids.isdisjoint(model.parameters)]

    def submitted(self, first, model):
        """An operation is about to be submitted; `first`: of its model's backward pass."""
        if not self.enabled:
            return
        if first:
            self.begins(model)
        self.models[model].running += 1

    def begins(self, model):
        """A backward pass begins. Returns whether it is a further one of the step under way."""
        step = self.models[model]
        if not step.running and not step.by_optimizer:
            self._settle([step], True)
        return step.pending

    def without_optimizer(self, model):
        """This rank only goes along with a pass of the others, and sees no optimizer end the step."""
        self.models[model].by_optimizer = False

    def optimizer_stepped(self, optimizer):
        """Called after every torch optimizer's step; ends the step of the models whose parameters it has."""
        stepped = self.models_of(optimizer)
        for step in stepped:
            step.by_optimizer = True
        self._settle(stepped, True)

    def optimizer_skipped(self, optimizer):
        """What the optimizer did not apply is taken back: of its models, of all where it is not known whose it has."""
        self._settle(self.models_of(optimizer) or self._models(), False)

    def ended(self, finite, operations, model):
        """Operations have ended. The last one of the backward pass settles the step when it was not finite."""
        if not self.enabled:
            return
        step = self.models[model]
        step.running -= operations
        step.finite = step.finite and finite
        step.pending = True
        if not step.running:
            self._return_dropped(step)
            if not step.finite:
                self._settle([step], False)

    def keep_what_passes_left(self, model, parameters):
        """A further pass of a step may return these, (key, elements), to what the passes before it have left."""
        step, communicator = self.models[model], self._alive()
        if not parameters or communicator is None:
            return
        for key, elements in parameters:
            if key not in step.before:
                step.before[key] = Kept.read(communicator, key, elements, self.momentum)
        communicator.commit_residuals([key for key, _ in parameters])

    def give_back(self, model, keys):
        """What arrives for these in the pass that has been submitted is dropped on every rank."""
        step = self.models[model]
        step.dropped.update(keys)
        self._return_dropped(step)

    def _return_dropped(self, step):
        """Where the pass has ended: by then its residuals are written."""
        communicator = self._alive()
        if step.running or not step.dropped or communicator is None:
            return
        dropped, step.dropped = [*step.dropped], set()
        communicator.rollback_residuals(dropped)

    def commit(self, model=None):
        """Keeps what one model's step has left, or every model's."""
        self._settle(self._models() if model is None else [self.models[model]], True)

    def _settle(self, steps, keep):
        ripe = [step for step in steps if step.pending and not step.running]
        communicator = self._alive()
        if not ripe or communicator is None:
            return
        for step in ripe:
            step.pending, step.finite = False, True
        others = any(step.pending or step.running for step in self._models())
        keys = [key for step in ripe for key in step.keys] if others else None
        if keep:
            communicator.commit_residuals(keys)
        else:
            communicator.rollback_residuals(keys)
        for step in ripe:
            before, step.before = step.before, {}
            if not keep:
                for key, kept in before.items():
                    kept.write(communicator, key)

    def _forget_dropped(self):
        """Frees the residuals of models that are gone, as far as no operation may still write to them."""
        dropped, self.dropped = self.dropped, []
        for model in dropped:
            step = self.models[model]
            if step.running:
                self.dropped.append(model)
                continue
            self._settle([step], True)
            communicator = self._alive()
            if self.enabled and communicator is not None:
                for key in step.keys:
                    communicator.write_residual(key, None, 0)
            del self.models[model]

    def scale(self, factor, models):
        """Keeps what these models' steps have left, and multiplies it."""
        communicator = self._alive()
        if communicator is None or not models:
            return
        self._settle(models, True)
        for model in models:
            for kept in model.before.values():
                kept.scale(factor)
        if len(models) == len(self._models()):
            communicator.scale_residuals(factor)
        else:
            self._scale_some(communicator, factor, models)

    def _scale_some(self, communicator, factor, models):
        """The CPU's communicator knows no keys here, and can't be written to amid a pass."""
        if any(model.running for model in models):
            communicator.scale_residuals(factor)
            return
        largest = torch.finfo(torch.float32).max  # a residual that is not finite would spoil every step to come
        for model in models:
            for key, elements in model.elements.items():
                residual = residual_of(communicator, key, elements).mul_(factor).clamp_(-largest, largest)
                communicator.write_residual(key, residual.data_ptr(), elements)

    def _models(self):
        return list(self.models.values())  # other threads may add some

    def _alive(self):
        communicator = self._communicator()
        return None if communicator is None or communicator.closed else communicator


class Kept:
    """What is kept of a parameter from step to step: its residual and, with momentum correction, its velocity."""

    def __init__(self, residual, velocity=None):
        self.residual, self.velocity = residual, velocity

    @classmethod
    def read(cls, communicator, key, shape, momentum):
        velocity = velocity_of(communicator, key, shape) if momentum else None
        return cls(residual_of(communicator, key, shape), velocity)

    def write(self, communicator, key):
        communicator.write_residual(key, self.residual.data_ptr(), self.residual.numel())
        if self.velocity is not None and self.velocity.numel():
            communicator.write_velocity(key, self.velocity.data_ptr(), self.velocity.numel())

    def scale(self, factor):
        self.residual.mul_(factor)
        if self.velocity is not None:
            self.velocity.mul_(factor)


def velocity_of(communicator, key, shape):
    """A parameter's velocity under momentum-corrected top-k, likewise."""
    velocity = torch.zeros(shape, dtype=torch.float32)
    communicator.read_velocity(key, velocity.data_ptr(), velocity.numel())
    return velocity


def residual_of(communicator, key, shape):
    """A parameter's residual as the last step that has ended left it."""
    residual = torch.zeros(shape, dtype=torch.float32)
    communicator.read_residual(key, residual.data_ptr(), residual.numel())
    return residual
