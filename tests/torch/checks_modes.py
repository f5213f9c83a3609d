"""DDP's modes with a codec ($PACELINE_CODEC): what travelled and what is owed add up to the gradients, on every rank.

The script's gradient is what .grad holds as the bucket leaves; what travelled is what .grad holds afterwards, and where
no rank has used a parameter nothing travelled.
"""

import os

os.environ["PACELINE_NODE_ID"] = "node " + os.environ["RANK"]

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, batch, graphs_compiled, paceline_off
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline._torch.ddp import attachment_of

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
TOPK = os.environ["PACELINE_CODEC"] == "topk"
WIDTH = 40
MODES = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]
#: Which branches a step takes.
BOTH, ONE = ("first", "second"), ("first",)
#: Of a mean of casts of two ranks' numbers.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6} if TOPK else {"rtol": 2e-3, "atol": 1e-5}


class Branches(torch.nn.Module):
    """Two layers of which a step takes those that it is told to."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = torch.nn.Linear(6, WIDTH)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x, taken=BOTH):
        x = torch.tanh(self.stem(x))
        for name in taken:
            x = x + torch.tanh(getattr(self, name)(x))
        return self.head(x)


def wrapped(module, bucket_cap_mb=0.005, **arguments):
    return DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb, **arguments)


def backward(model, step, *arguments, factor=1.0):
    ((model(batch(step, 8, 6, dtype=torch.float32), *arguments) ** 2).mean() * factor).backward()


def residuals(model):
    return paceline.torch.residual_state_dict(model)["residuals"]


def summed(named):
    """In double precision, over all ranks."""
    total = {name: tensor.double().clone() for name, tensor in named.items()}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return total


def gradients(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.module.named_parameters()}


def identical(a, b):
    return all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)


def of_the_second(named):
    return {name: tensor for name, tensor in named.items() if name.startswith("second")}


def sums_of(model):
    return {name: SIZE * gradient.double() for name, gradient in gradients(model).items()}


def prefixed(name):
    return lambda text: f"{name}: {text}"


class Books:
    """What every rank has computed, what has travelled, what is owed."""

    def __init__(self, model, exact):
        self.model, self.exact = model, exact
        self.owed = summed(residuals(model))

    def assert_they_balance(self):
        """After a step of this model; the other one, whose gradients have travelled exactly, gets its parameters."""
        owed = summed(residuals(self.model))
        for name, sent in sums_of(self.model).items():
            right = sums_of(self.exact)[name] + self.owed[name]
            torch.testing.assert_close(sent + owed[name], right, **TOLERANCE, msg=prefixed(name))
        self.owed = owed
        with torch.no_grad():
            for mine, theirs in zip(self.model.module.parameters(), self.exact.module.parameters()):
                theirs.copy_(mine)

    def assert_something_is_owed(self):
        assert any(bool(owed.any()) for owed in self.owed.values()) == TOPK


def twins(seed, **arguments):
    ours = wrapped(Branches(seed), **arguments)
    attachment_of(ours)
    with paceline_off():
        return ours, wrapped(Branches(seed), **arguments)


@check
def every_mode_balances():
    for seed, arguments in enumerate(MODES):
        ours, exact = twins(seed, **arguments)
        books = Books(ours, exact)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for step in range(4):
            for model in (ours, exact):
                model.zero_grad()
                backward(model, step)
            assert_same_on_all_ranks([p.grad for p in ours.parameters()])
            optimizer.step()
            books.assert_they_balance()
        books.assert_something_is_owed()


@check
def a_compiled_model_balances():
    if not hasattr(torch, "compile"):
        return  # what older torch answers: test_older.py
    ours, exact = twins(6, bucket_cap_mb=1)  # its compiler takes no smaller buckets
    compiled = torch.compile(ours)
    books = Books(ours, exact)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(4):
        for model in (ours, exact):
            model.zero_grad()
            backward(compiled if model is ours else model, step)
        assert_same_on_all_ranks([p.grad for p in ours.parameters()])
        optimizer.step()
        books.assert_they_balance()
    books.assert_something_is_owed()
    assert graphs_compiled() > 0, "torch.compile has passed the model by"


@check
def what_no_rank_uses_owes_what_it_owed():
    """(gradient or 0) + residual stays as it was in every bit, on every rank; the rest balances."""
    for view, overlap in ((False, None), (True, None), (False, "forward")):
        ours, exact = twins(7, find_unused_parameters=True, gradient_as_bucket_view=view)
        books = Books(ours, exact)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer = paceline.torch.DistributedOptimizer(optimizer, model=ours, overlap=overlap)
        for step in range(9):
            taken = ONE if step in (3, 6, 7) else BOTH
            before = residuals(ours)
            for model in (ours, exact):
                model.zero_grad(set_to_none=True)
                backward(model, step, taken)
            optimizer.synchronize()
            after = residuals(ours)
            assert all((p.grad is None) == (taken is ONE) for p in ours.module.second.parameters())
            if taken is ONE:
                assert identical(of_the_second(before), of_the_second(after)), step
            optimizer.step()
            books.assert_they_balance()
        assert bool(books.owed["second.weight"].any()) == TOPK


@check
def what_one_rank_uses_is_applied_everywhere():
    ours, exact = twins(8, find_unused_parameters=True)
    books = Books(ours, exact)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(6):
        taken = BOTH if step % 2 == 0 or RANK == 1 else ONE
        for model in (ours, exact):
            model.zero_grad(set_to_none=True)
            backward(model, step, taken)
        assert_same_on_all_ranks([p.grad for p in ours.parameters()])
        optimizer.step()
        books.assert_they_balance()


@check
def an_old_gradient_keeps_what_is_owed_too():
    """Where no rank has used a parameter .grad stays as it was, but for a bucket's view or an overlapped step's."""
    for view, overlap in ((False, None), (True, None), (False, "forward")):
        ours = wrapped(Branches(9), find_unused_parameters=True, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer = paceline.torch.DistributedOptimizer(optimizer, model=ours, overlap=overlap)
        for step in range(6):
            before = of_the_second(residuals(ours))
            ours.zero_grad(set_to_none=False)
            backward(ours, step, ONE if step in (3, 5) else BOTH)
            optimizer.synchronize()
            after = of_the_second(residuals(ours))
            if step in (3, 5):
                sent = of_the_second(sums_of(ours))
                arrives = view or overlap
                assert arrives or not any(gradient.any() for gradient in sent.values())
                assert arrives or identical(before, after), step
                left, right = summed(after), summed(before)
                for name in left:
                    torch.testing.assert_close(sent[name] + left[name], right[name], **TOLERANCE)
            optimizer.step()


@check
def an_unused_parameter_in_a_further_pass_of_a_step():
    """The first pass has sent and kept; those after it find that, and an Inf takes all of them back."""
    ours, once = (wrapped(Branches(10), find_unused_parameters=True) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, once)]
    for step in range(5):
        before = residuals(ours)
        for model in (ours, once):
            model.zero_grad(set_to_none=True)
            backward(model, step, BOTH if RANK == 1 or step % 2 else ONE)
        gradient = ours.module.second.weight.grad.clone()
        backward(ours, 10 + step, ONE)
        if step == 4:
            backward(ours, 20, BOTH, factor=float("inf") if RANK == 0 else 1.0)
            assert identical(before, residuals(ours))
            return
        backward(ours, 30 + step, ONE)
        assert torch.equal(ours.module.second.weight.grad, gradient)
        state = paceline.torch.residual_state_dict(ours)
        assert identical(of_the_second(state["residuals"]), of_the_second(residuals(once))), step
        assert step % 2 == 0 or identical(of_the_second(before), of_the_second(state["residuals"])) != TOPK
        for optimizer in optimizers:
            optimizer.step()
        paceline.torch.load_residual_state_dict(once, state)
        with torch.no_grad():
            for mine, theirs in zip(ours.module.parameters(), once.module.parameters()):
                theirs.copy_(mine)


@check
def join_balances():
    """Rank 0 runs out of inputs and goes on to pay what it owes; a late Inf takes its own pass back, no other."""
    for arguments in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        ours, local = wrapped(Branches(11), **arguments), Branches(11)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        computed, sent = ({name: torch.zeros(p.shape) for name, p in local.named_parameters()} for _ in range(2))
        with ours.join():
            for step in range(3 if RANK == 0 else 9):
                taken = ONE if arguments.get("find_unused_parameters") and step in (2, 3, 4) else BOTH
                local.load_state_dict(ours.module.state_dict())
                for model in (ours, local):
                    model.zero_grad(set_to_none=True)
                    backward(model, step, taken, factor=float("inf") if step == 7 else 1.0)
                if step == 7:
                    assert not ours.module.first.weight.grad.isfinite().all()
                    continue
                for name, p in local.named_parameters():
                    computed[name] += 0 if p.grad is None else p.grad
                for name, p in ours.module.named_parameters():
                    if RANK == SIZE - 1 and p.grad is not None:  # of what all ranks get
                        sent[name] += SIZE * p.grad
                optimizer.step()
        owed, computed, sent = summed(residuals(ours)), summed(computed), summed(sent)
        for name in owed:
            torch.testing.assert_close(sent[name] + owed[name], computed[name], **TOLERANCE, msg=prefixed(name))
        assert bool(owed["first.weight"].any()) == TOPK


if __name__ == "__main__":
    run()
