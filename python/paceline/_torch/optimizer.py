"""paceline.torch.DistributedOptimizer: an optimizer whose updates need not all be there before the next forward pass.

The optimizer stays the object that it was (learning rate schedulers, checkpoints and isinstance go on as before); its
class becomes one derived from its own. An update of a bucket is the class's own step() on a second object with the
same state and this bucket's parameters, so it is the update that a plain step() makes, bit by bit.
"""

import collections
import contextlib
import inspect

import torch
import torch.distributed as dist

from paceline import _state
from paceline._torch import carriers, cpu_ddp, ddp
from paceline._torch.overlap import Overlap, refuse_hook
from paceline._torch.pending_gradient import PendingGradient
from paceline._torch.start_lines import say_once
from paceline.errors import InvalidArgumentError, UnsupportedError

#: torch's optimizers that update each parameter by itself: which are updated together changes nothing.
_BY_PARAMETER = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
_BY_PARAMETER += ("Adafactor", "Muon")
#: zero_grad()'s default: torch 2's is another than torch 1's.
_SET_TO_NONE = inspect.signature(torch.optim.Optimizer.zero_grad).parameters["set_to_none"].default
_classes = {}


def distributed_optimizer(optimizer, named_parameters=None, *, model=None, overlap=None, per_parameter=False):
    """The optimizer, with updates that are made as their gradients arrive (overlap="forward"); the object given.

    optimizer: any of torch's that update each parameter by itself. named_parameters: (name, parameter) pairs, for
    messages. model: the DistributedDataParallel model whose parameters it updates, or a list; None: found by the
    parameters. overlap: None leaves the optimizer's step() as it is; "forward": backward() and step() wait for no
    gradient, each layer of the next forward pass waits for its own update, and parameters and optimizer state end bit
    by bit as without. per_parameter: an optimizer that is not torch's updates each parameter by itself too.

    Beside the optimizer's own methods: synchronize() waits until all updates are made and gradients not yet used are in
    .grad (before clipping, and before direct reads of parameters); skip_synchronize() is Horovod's context for step().

    Raises InvalidArgumentError and UnsupportedError that name what is wrong. The next wait after a fault (a forward
    pass, of fused optimizers on GPUs a backward pass, step(), synchronize(), state_dict()) raises the PacelineError
    that names the rank.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if overlap not in (None, "forward"):
        raise InvalidArgumentError(f'overlap={overlap!r}: give "forward" or None')
    if isinstance(optimizer, _Distributed):
        raise InvalidArgumentError("this optimizer is a DistributedOptimizer already")
    names = _names(optimizer, named_parameters)
    if overlap is None:
        return _become(optimizer, _Plain, names, [])
    _check_kind(optimizer, per_parameter)
    found = _attachments(optimizer, model)
    made = _become(optimizer, _Overlapped, names, found)
    return made


def _names(optimizer, named_parameters):
    """{id: name}. Raises InvalidArgumentError where names repeat, or parameters of the optimizer have none."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InvalidArgumentError(f"named_parameters names {', '.join(twice[:5])} more than once")
    by_id = {id(parameter): name for name, parameter in pairs}
    without = sum(id(p) not in by_id for group in optimizer.param_groups for p in group["params"])
    if without:
        raise InvalidArgumentError(
            f"named_parameters lacks {without} of the optimizer's parameters; give model.named_parameters()"
        )
    return by_id


def _known(kind):
    return any(kind is getattr(torch.optim, name, None) for name in _BY_PARAMETER)


def _check_kind(optimizer, per_parameter):
    kind = type(optimizer)
    if _known(kind) or (per_parameter and not isinstance(optimizer, torch.optim.LBFGS)):
        return
    raise UnsupportedError(
        f'overlap="forward" updates parameters bucket by bucket; of {kind.__name__} it is not known that each '
        f"parameter is updated by itself. Known: {', '.join(_BY_PARAMETER)}. If yours does so too, give "
        "per_parameter=True"
    )


def _attachments(optimizer, model):
    """The DDP models of these parameters that travel through Paceline."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if model is not None:
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        for one in models:
            if not isinstance(one, torch.nn.parallel.DistributedDataParallel):
                raise InvalidArgumentError(
                    f"model={type(one).__name__}: give the DistributedDataParallel model, or a list of them"
                )
            if not any(id(p) in ids for p in one.module.parameters()):
                raise InvalidArgumentError("the optimizer has none of the model's parameters")
    else:
        models = [one for one in ddp.wrapped_models() if any(id(p) in ids for p in one.module.parameters())]
    if not models and not _state.disabled() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            'overlap="forward": no DistributedDataParallel model has these parameters; wrap the model before the '
            "optimizer, after `import paceline.torch`"
        )
    return [(one, ddp.attachment_or_none(one)) for one in models]


def _become(optimizer, kind, names, models):
    own = type(optimizer)
    if (own, kind) not in _classes:
        _classes[own, kind] = type(own.__name__, (kind, own), {"__module__": own.__module__})
    patched = optimizer.__dict__.pop("step", None)  # a scheduler's, around the former class's step()
    optimizer.__class__ = _classes[own, kind]
    patch = getattr(optimizer, "_patch_step_function", None) or optimizer._hook_for_profile
    patch()
    if patched is not None:
        step = type(optimizer).step
        step._wrapped_by_lr_sched = step._with_counter = True
    optimizer._paceline_begin(own, names, models)
    return optimizer


class _Distributed:
    """What both kinds have, in Horovod's names."""

    def _paceline_begin(self, own, names, models):
        self._paceline_class = own

    def __reduce_ex__(self, protocol):
        """Copies and pickles are optimizers of the class that this one was."""
        return _without_init, (self._paceline_class,), self.__getstate__()

    def synchronize(self):
        """Waits until gradients are in hand (.grad) and all updates are made."""

    @contextlib.contextmanager
    def skip_synchronize(self):
        """Around step() after synchronize(), as Horovod's scripts write it; step() does not need it."""
        yield

    def _paceline_counted(self):
        self._opt_called = True  # what learning rate schedulers look at
        self._step_count = getattr(self, "_step_count", 0) + 1


class _Plain(_Distributed):
    """Without overlap: DDP has averaged the gradients when backward() returns."""

    def step(self, *args, **kwargs):
        self._paceline_counted()
        return super().step(*args, **kwargs)


class _Overlapped(_Distributed):
    def _paceline_begin(self, own, names, models):
        super()._paceline_begin(own, names, models)
        step = own.step
        self._paceline_step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._paceline_overlaps = []
        self._paceline_names = names
        self._paceline_known = _known(own)
        for model, found in models:
            if found is None:
                continue
            if found.delegate is not None:
                refuse_hook()
            if found.overlap is None:
                found.overlap = Overlap(model, _carrier_of(found), {**found.parameter_names(), **names})
            self._paceline_overlaps.append(found.overlap)
        self._paceline_own()
        if not self._paceline_overlaps:
            say_once(_NOTHING_TO_OVERLAP)

    def _paceline_own(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._paceline_owned = {id(parameter) for parameter in parameters}
        for one in self._paceline_overlaps:
            one.own(self, parameters)

    def step(self, closure=None):
        """Notes the hyperparameters and which updates to make; makes those whose gradients have arrived."""
        if not self._paceline_overlaps:
            self._paceline_counted()
            return self._paceline_step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._paceline_counted()
        groups = [{k: _captured(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        own = {} if self._paceline_known else {k: v for k, v in self.__dict__.items() if isinstance(v, (int, float))}
        places = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        if places.keys() != self._paceline_owned:  # the script has changed its groups by itself
            self._paceline_own()

        def update(pairs, gate=None):
            self._paceline_update((groups, own), places, pairs, gate)

        now = [p for group in self.param_groups for p in group["params"] if _in_hand(p.grad)]
        copies = [v for group in groups for v in group.values() if isinstance(v, torch.Tensor)]
        for one in self._paceline_overlaps:
            one.carrier.reads_later(copies)
            one.request(self, update, self._paceline_class)
        if now:
            for parameter in now:
                self._paceline_wait(parameter)
            update([(p, p.grad) for p in now])
        return loss

    def synchronize(self):
        for one in self._paceline_overlaps:
            one.gradients_in_hand(self)

    def zero_grad(self, set_to_none=_SET_TO_NONE):
        if not set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self._paceline_pending(parameter):
                        parameter.grad.zero_()
        super().zero_grad(set_to_none=set_to_none)

    def state_dict(self, *args, **kwargs):
        self._paceline_finish()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        self._paceline_finish()
        return super().load_state_dict(*args, **kwargs)

    def add_param_group(self, *args, **kwargs):
        self._paceline_finish()
        super().add_param_group(*args, **kwargs)
        self._paceline_own()

    def __getstate__(self):
        self._paceline_finish()
        return super().__getstate__()

    def _paceline_finish(self):
        for one in self._paceline_overlaps:
            one.finish_updates()

    def _paceline_pending(self, parameter):
        return any(one.pending(parameter) for one in self._paceline_overlaps)

    def _paceline_wait(self, parameter):
        for one in self._paceline_overlaps:
            one.want(parameter)

    def _paceline_update(self, noted, places, pairs, gate):
        """The former class's step() for these parameters alone, with these gradients. gate: see Carrier.read_gate().

        noted: hyperparameters of the moment of step(), in groups and in the optimizer itself.
        """
        groups, own = noted
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.__dict__.update(own)
        if gate is not None:
            part.found_inf = gate
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            part.__dict__[name] = collections.OrderedDict()  # the script's are called once a step
        part.param_groups = [{**group, "params": []} for group in groups]
        before = []
        for parameter, gradient in pairs:
            part.param_groups[places[id(parameter)]]["params"].append(parameter)
            before.append(parameter.grad)
            parameter.grad = gradient
        part.param_groups = [group for group in part.param_groups if group["params"]]
        numbers = None if self._paceline_known else _numbers(part)
        try:
            self._paceline_step(part)
        finally:
            for (parameter, _), gradient in zip(pairs, before):
                parameter.grad = gradient
        if numbers is not None and numbers != _numbers(part):
            _refuse_counting(self._paceline_class, numbers, _numbers(part))


def _numbers(optimizer):
    """What a step() may count in beside the state of each parameter: where it stands, and how often it was written."""
    found = {f"self.{name}": _number(value) for name, value in optimizer.__dict__.items()}
    for at, group in enumerate(optimizer.param_groups):
        found.update({f"param_groups[{at}]['{name}']": _number(value) for name, value in group.items()})
    return {name: value for name, value in found.items() if value is not None}


def _number(value):
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _refuse_counting(kind, before, after):
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    raise UnsupportedError(
        f'overlap="forward" calls {kind.__name__}.step() for each bucket, and it changes {", ".join(changed)}: of a '
        "step's calls none would see what the others change. Keep it in self.state[parameter], or leave overlap out"
    )


def _in_hand(gradient):
    return gradient is not None and type(gradient) is not PendingGradient


def _carrier_of(attachment):
    from paceline._torch import cuda_overlap

    if isinstance(attachment, cpu_ddp.CpuAttachment):
        return carriers.CpuCarrier(attachment)
    return cuda_overlap.CudaCarrier(attachment)


_NOTHING_TO_OVERLAP = (
    'overlap="forward" has nothing to overlap: no gradient of this optimizer travels through Paceline; step() is as '
    "usual"
)


def _without_init(kind):
    return kind.__new__(kind)


def _captured(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
