"""Optimizers, GradScaler and residuals.

A step of the optimizer keeps its residuals, a skipped one takes them back, a new loss scale rescales them.
"""

import functools
import weakref

from paceline._torch.cuda_steps import after_optimizer_step, before_optimizer_step
from paceline._torch.residuals import ResidualSteps, has_stepped, rescale, scaler_decides

#: The optimizers of each GradScaler, which forgets them at every update.
_optimizers = weakref.WeakKeyDictionary()


def watch_optimizers(optimizer_module):
    """Hears of every step of every optimizer: torch 2 has a hook, older torch calls a method for its profiler."""
    if getattr(optimizer_module, "_paceline_watching", False):
        return
    register = getattr(optimizer_module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_stepped)
        optimizer_module.register_optimizer_step_pre_hook(before_optimizer_step)
    elif hasattr(optimizer_module.Optimizer, "_optimizer_step_code"):
        _watch_step_code(optimizer_module.Optimizer)
    optimizer_module._paceline_watching = True


def _watch_step_code(cls):
    original = cls._optimizer_step_code

    @functools.wraps(original)
    def _optimizer_step_code(self):
        original(self)
        _stepped(self, (), {})

    cls._optimizer_step_code = _optimizer_step_code


def _stepped(optimizer, _args, _kwargs):
    if hasattr(optimizer, "_paceline_overlaps"):
        return  # tells by itself, when its gradients have arrived
    after_optimizer_step(optimizer)
    has_stepped(optimizer, ResidualSteps.every())


def patch(scaler_class):
    """Wraps step() and update() of a GradScaler class; does nothing while no communicator keeps residuals."""
    if "_paceline_patched" in scaler_class.__dict__:
        return
    scaler_class._paceline_patched = True
    step, update = scaler_class.step, scaler_class.update

    @functools.wraps(step)
    def step_with_residuals(self, optimizer, *args, **kwargs):
        if not self.is_enabled():
            return step(self, optimizer, *args, **kwargs)
        _take_in_hand(self, optimizer)
        with scaler_decides() as stepped:
            result = step(self, optimizer, *args, **kwargs)
        steps = ResidualSteps.of_optimizer(optimizer)
        if steps and _found_inf(self, optimizer):
            for one in steps:
                one.optimizer_skipped(optimizer)
        else:
            for one in stepped:
                has_stepped(one, ResidualSteps.every())
        return result

    @functools.wraps(update)
    def update_with_residuals(self, *args, **kwargs):
        steps = ResidualSteps.every() if self.is_enabled() else []
        before = self.get_scale() if steps else 1.0
        result = update(self, *args, **kwargs)
        after = self.get_scale() if steps else 1.0
        if after != before and before > 0:
            rescale(list(_optimizers.get(self, ())), after / before)
        return result

    unscale = scaler_class.unscale_

    @functools.wraps(unscale)
    def unscale_in_hand(self, optimizer):
        if self.is_enabled():
            _take_in_hand(self, optimizer)
        return unscale(self, optimizer)

    scaler_class.unscale_ = unscale_in_hand
    scaler_class.step = step_with_residuals
    scaler_class.update = update_with_residuals


def _take_in_hand(scaler, optimizer):
    """A scaler looks at all gradients before it decides whether to step."""
    _optimizers.setdefault(scaler, weakref.WeakSet()).add(optimizer)
    if hasattr(optimizer, "_paceline_overlaps"):
        optimizer.synchronize()


def _found_inf(scaler, optimizer):
    state = scaler._per_optimizer_states[id(optimizer)]
    return any(found.item() for found in state["found_inf_per_device"].values())
