"""What a parameter's .grad holds while the gradient travels: any use of it is a named error, not a wrong number."""

import weakref

import torch

from paceline.errors import UnsupportedError

#: What torch itself asks before it clears a gradient, and what tells nothing about its values.
_HARMLESS = {"shape", "dtype", "device", "layout", "is_leaf", "requires_grad", "grad_fn", "size", "dim", "numel"}
_HARMLESS |= {"stride", "is_floating_point", "is_complex", "__repr__", "__len__"}


class PendingGradient(torch.Tensor):
    """A tensor of the gradient's shape and type without its values; one a parameter, made once."""

    @classmethod
    def of(cls, parameter, name, overlap):
        """overlap: a weak reference to the one that the gradient is under way with."""
        # One NaN seen from every element: what goes past __torch_function__ can't take it for a gradient.
        nan = torch.full((1,) * parameter.dim(), float("nan"), dtype=parameter.dtype, device=parameter.device)
        made = torch.Tensor._make_subclass(cls, nan.expand(parameter.shape))
        made._name = name
        made._overlap = overlap
        made._parameter = weakref.ref(parameter)
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        if name == "__get__":
            name = function.__self__.__name__
        pending = next(a for a in _flattened((args, kwargs or {})) if isinstance(a, cls))
        if name in _HARMLESS:
            with torch._C.DisableTorchFunction():
                return "a gradient on its way" if name == "__repr__" else function(*args, **(kwargs or {}))
        if name in ("requires_grad_", "detach_"):  # Module.zero_grad(set_to_none=False)
            return pending
        if name == "zero_":
            return pending._clear()
        raise pending._refusal(name)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """What torch's C++ does by itself: a backward pass that DDP takes no part in adds to .grad."""
        name = getattr(function, "__name__", str(function)).split(".")[0]
        pending = next(a for a in _flattened((args, kwargs or {})) if isinstance(a, cls))
        overlap, parameter = pending._overlap(), pending._parameter()
        if name not in ("add", "add_") or overlap is None or not overlap.pending(parameter):
            raise pending._refusal(name)
        gradient = overlap.in_hand(parameter)
        return function(*(gradient if a is pending else a for a in args), **(kwargs or {}))

    def _refusal(self, name):
        return UnsupportedError(
            f"'{name}' on the gradient of '{self._name}', which is on its way: with overlap=\"forward\" gradients "
            "are in hand only after optimizer.synchronize(). Call it after backward() and before gradients are "
            "clipped, read or changed; that step then waits for all of them"
        )

    def _clear(self):
        parameter = self._parameter()
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return parameter.grad


def _flattened(value):
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _flattened(one)
    elif isinstance(value, dict):
        yield from _flattened(list(value.values()))
    else:
        yield value
