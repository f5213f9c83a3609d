"""Hears of every read of a module's parameters, before it happens.

A module's forward pass is announced by a pre-hook. Parameters that another module reads (tied weights, functional
calls, nn.MultiheadAttention with its out_proj, state_dict(), parameters()) are looked up in the module's dict of
parameters; that dict tells before it answers.
"""

import collections
import copy
import functools

import torch

MODERN = hasattr(torch, "compile")


class _Telling:
    """Mixed into the dict type of Module._parameters. `reads`: who is told."""

    reads = None

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        self.reads.parameter(parameter)
        return parameter

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

    def __reduce_ex__(self, protocol):
        return self._plain, (list(self.items()),)

    def __deepcopy__(self, memo):
        return self._plain((name, copy.deepcopy(parameter, memo)) for name, parameter in self.items())


class _TellingDict(_Telling, dict):
    _plain = dict


class _TellingOrderedDict(_Telling, collections.OrderedDict):
    _plain = collections.OrderedDict


class ModuleReads:
    """Watches a module and all below it, until stop().

    pending: parameters, by id, that must not be read yet, kept by the owner; want(parameter, in_forward) is called
    before one of them is read (in_forward: by its module's forward pass), want_all() before parameters are read that
    nobody can name, and before state_dict().
    """

    def __init__(self, module, want, want_all):
        self.pending = {}
        self._want = want
        self._want_all = want_all
        self._modules = list(module.modules())
        self._hooks = []
        #: Modules whose reads nobody can hear: TorchScript keeps its parameters elsewhere.
        self._opaque = [m for m in self._modules if isinstance(m, torch.jit.ScriptModule)]
        for one in self._modules:
            if one._parameters and not isinstance(one, torch.jit.ScriptModule):
                self._watch(one)

    def parameter(self, parameter, in_forward=False):
        if self.pending and id(parameter) in self.pending:
            self._want(parameter, in_forward)

    def everything(self):
        self._want_all()

    def before_model(self):
        """The forward pass of the whole model begins."""
        if self.pending and (self._opaque or any(map(_is_compiled, self._modules))):
            self._want_all()

    def __reduce__(self):
        return _NobodyListens, ()  # a copy of a module has its parameters in hand

    def stop(self):
        for hook in self._hooks:
            hook.remove()
        for one in self._modules:
            parameters = one.__dict__.get("_parameters")
            if isinstance(parameters, _Telling) and parameters.reads is self:
                one.__dict__["_parameters"] = parameters._plain(parameters.items())

    def _watch(self, module):
        kind = _TellingOrderedDict if isinstance(module._parameters, collections.OrderedDict) else _TellingDict
        telling = kind(module._parameters)
        telling.reads = self
        module.__dict__["_parameters"] = telling
        self._hooks.append(module.register_forward_pre_hook(functools.partial(_before_forward, self)))
        if hasattr(module, "register_state_dict_pre_hook"):  # older torch has none, and reads the parameters
            self._hooks.append(module.register_state_dict_pre_hook(functools.partial(_before_state_dict, self)))


class _NobodyListens:
    """What copies of a module have in a ModuleReads' place."""

    pending = ()

    def everything(self):
        pass


def _before_forward(reads, module, _args):
    if not reads.pending or _compiling():
        return  # a compiled region's guards look at its parameters before it runs
    for parameter in dict.values(module._parameters):
        reads.parameter(parameter, in_forward=True)


def _before_state_dict(reads, _module, _prefix, _keep_vars):
    reads.everything()


def _is_compiled(module):
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _compiling():
    return MODERN and torch.compiler.is_compiling()
