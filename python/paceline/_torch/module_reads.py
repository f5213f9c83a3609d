"""Hears of every read of a module's parameters that must not be read yet, before it happens.

Parameters are looked up in their module's dict, by its own forward pass and by others (tied weights, functional calls,
nn.MultiheadAttention with its out_proj, state_dict(), parameters()). While one of them is pending that dict is of a
class that tells before it answers; else of one that costs nothing. Modules whose forward pass may have parameters in
hand from elsewhere (nn.LSTM's list of weights) are announced by a pre-hook as well.
"""

import collections
import copy
import functools
import types
import weakref

import torch

MODERN = hasattr(torch, "compile")


#: Their forward passes look their parameters up, and hooks would slow each call down.
_LOOK_UP = ("Linear", "Bilinear", "LayerNorm", "GroupNorm", "RMSNorm", "SyncBatchNorm", "PReLU")
_LOOK_UP += ("Embedding", "EmbeddingBag")
_LOOK_UP += tuple(f"{kind}{d}d" for kind in ("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm") for d in (1, 2, 3))


class _Watched:
    """Mixed into the dict types of Module._parameters. readers: all ModuleReads that are told while one is pending."""

    readers = ()

    def __reduce_ex__(self, protocol):
        return self._plain, (list(self.items()),)

    def __deepcopy__(self, memo):
        return self._plain((name, copy.deepcopy(parameter, memo)) for name, parameter in self.items())


class _Telling(_Watched):
    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        for one in self.readers:
            one.parameter(parameter)
        return parameter

    def __iter__(self):
        return super().__iter__()  # dict(self) and {**self} look up only where this is not dict's own

    def get(self, name, default=None):
        if name not in self:
            return default
        return self[name]

    def items(self):
        for name in list(self):
            yield name, self[name]

    def values(self):
        for name in list(self):
            yield self[name]

    def pop(self, name, *default):
        if name in self:
            self[name]
        return super().pop(name, *default)

    def copy(self):
        return self._plain(self.items())


class _QuietDict(_Watched, dict):
    _plain = dict


class _TellingDict(_Telling, dict):
    _plain = dict


class _QuietOrderedDict(_Watched, collections.OrderedDict):
    _plain = collections.OrderedDict


class _TellingOrderedDict(_Telling, collections.OrderedDict):
    _plain = collections.OrderedDict


_TELLING = {_QuietDict: _TellingDict, _QuietOrderedDict: _TellingOrderedDict}
_QUIET = {telling: quiet for quiet, telling in _TELLING.items()}
_everyone = weakref.WeakSet()


class ModuleReads:
    """Watches a module and all below it, until stop(); and what other watched modules share with it.

    pending: {id of a parameter that must not be read yet: whatever the owner has put there}. want(parameter) is called
    before one of them is read, want_all() before parameters are read that nobody can name, and before state_dict().
    """

    def __init__(self, module, want, want_all):
        self.pending = {}
        self._want = want
        self._want_all = want_all
        self._modules = list(module.modules())
        self._hooks = []
        self._dicts = {}  # id of a parameter: the dicts that it was in
        #: Modules whose reads nobody can hear: TorchScript keeps its parameters elsewhere.
        self._opaque = [m for m in self._modules if isinstance(m, torch.jit.ScriptModule)]
        for one in self._modules:
            if one._parameters and not isinstance(one, torch.jit.ScriptModule):
                self._watch(one)
        for other in list(_everyone):
            self._share(other)
        _everyone.add(self)

    def expect(self, parameters, owner):
        """These must not be read from now on."""
        for parameter in parameters:
            self.pending[id(parameter)] = owner
            for one in self._dicts.get(id(parameter), ()):
                _tell(one)

    def forget(self, parameters):
        """These may be read again."""
        for parameter in parameters:
            self.pending.pop(id(parameter), None)
        for parameter in parameters:
            for one in self._dicts.get(id(parameter), ()):
                kind = _QUIET.get(type(one))
                if kind is not None and not any(
                    id(other) in reads.pending for reads in one.readers for other in kind.values(one)
                ):
                    one.__class__ = kind

    def parameter(self, parameter):
        if self.pending and id(parameter) in self.pending:
            self._want(parameter)

    def everything(self):
        self._want_all()

    def before_model(self):
        """The forward pass of the whole model begins."""
        if self.pending and (self._opaque or any(map(_has_parameters_in_hand, self._modules))):
            self._want_all()

    def __reduce__(self):
        return _NobodyListens, ()  # a copy of a module has its parameters in hand

    def stop(self):
        _everyone.discard(self)
        for hook in self._hooks:
            hook.remove()
        for one in (one for dicts in self._dicts.values() for one in dicts):
            one.readers = tuple(reads for reads in one.readers if reads is not self)
        for one in self._modules:
            parameters = one.__dict__.get("_parameters")
            if isinstance(parameters, _Watched) and not parameters.readers:
                one.__dict__["_parameters"] = parameters._plain(parameters.items())

    def _share(self, other):
        """Parameters that the modules of both have: a read through either's is told to both."""
        for known in self._dicts.keys() & other._dicts.keys():
            mine = self._dicts[known]
            both = mine + [one for one in other._dicts[known] if not any(one is found for found in mine)]
            self._dicts[known], other._dicts[known] = both, list(both)
            for one in both:
                one.readers += tuple(reads for reads in (self, other) if reads not in one.readers)
                if known in other.pending:
                    _tell(one)

    def _watch(self, module):
        watched = module._parameters
        if not isinstance(watched, _Watched):  # else of another model too
            kind = _QuietOrderedDict if isinstance(watched, collections.OrderedDict) else _QuietDict
            watched = module.__dict__["_parameters"] = kind(watched)
        watched.readers += (self,)
        for parameter in watched._plain.values(watched):
            if parameter is not None:
                self._dicts.setdefault(id(parameter), []).append(watched)
        if not any(type(module) is getattr(torch.nn, name, None) for name in _LOOK_UP):
            self._hooks.append(module.register_forward_pre_hook(_before_forward))
        if hasattr(module, "register_state_dict_pre_hook"):  # older torch has none, and reads the parameters
            self._hooks.append(module.register_state_dict_pre_hook(functools.partial(_before_state_dict, self)))


def _tell(parameters):
    kind = _TELLING.get(type(parameters))
    if kind is not None:
        parameters.__class__ = kind


class _NobodyListens:
    """What copies of a module have in a ModuleReads' place."""

    pending = ()

    def everything(self):
        pass


def _before_forward(module, _args):
    if not isinstance(module._parameters, _Telling) or _compiling():
        return  # a compiled region's guards look at its parameters before it runs
    for parameter in module._parameters.values():  # tells
        del parameter


def _before_state_dict(reads, _module, _prefix, _keep_vars):
    reads.everything()


def _has_parameters_in_hand(module):
    """Whether its forward pass is no look-up of its class's: compiled, a CUDA graph, a function that somebody made.

    Methods and partials around the class's own, as Accelerate puts there, look parameters up as it does.
    """
    forward = module.__dict__.get("forward")
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(forward, types.FunctionType)
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def _compiling():
    return MODERN and torch.compiler.is_compiling()
