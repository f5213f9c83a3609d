"""Gradients of embeddings by rows under DDP, on simulated GPUs: against plain DDP, float64, and sending all rows."""

import contextlib
import copy

import torch
from checks import check, run
from simulated_gpu import RANK, SIZE, assert_same_on_all_ranks, plain, settings, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline.torch
from paceline._torch import buckets, rows

rows.LEAST_BYTES = 1
VOCABULARY, WIDTH, BAG = 400, 24, 301
STEPS = 6


class Model(nn.Module):
    """An embedding, a bag of another, dense layers; its forward pass can leave the embedding out."""

    def __init__(self, outputs=8):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.bag = nn.EmbeddingBag(BAG, WIDTH, mode="sum")
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, outputs))

    def forward(self, tokens, bag, skip=False):
        mixed = self.bag(bag)
        if not skip:
            mixed = mixed + self.tokens(tokens).mean(1)
        return self.layers(mixed)


def batch(step, rank=RANK):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (8, 4), generator=generator)
    return tokens, torch.randint(BAG, (8, 3), generator=generator)


def loss_of(model, step, rank=RANK, **arguments):
    return (model(*batch(step, rank), **arguments) ** 2).mean()


def train(model, steps=STEPS, loss=loss_of, lr=0.1, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **arguments)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return model


def assert_equal(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(a, b), (name, (a - b).abs().max().item())


def by_rows(communicator):
    return {elements for count, elements in communicator.asked if elements}


@check
def exact_is_plain_ddp():
    """Two ranks add two numbers: there is one order."""
    several = {"static_graph": True, "bucket_cap_mb_list": [0.001, 0.005]}  # in the first pass, too
    for arguments in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.01}, several):
        theirs = train(plain(Model(), **arguments), momentum=0.9)
        with wrapped(Model(), **arguments) as (ours, communicator):
            train(ours, momentum=0.9)
            assert_same_on_all_ranks(ours)
            assert_equal(ours.module, theirs.module)
            assert by_rows(communicator) == {WIDTH}, communicator.asked


@check
def rows_are_sent_and_no_others():
    with wrapped(Model()) as (model, communicator):
        before = communicator.stats()
        train(model, 3)
        after = communicator.stats()
        looked_up = 0
        for step in range(3):
            tokens, bag = batch(step)
            looked_up += len(set(tokens.reshape(-1).tolist()) - {3}) + len(set(bag.reshape(-1).tolist()))
        assert after["rows_sent"] - before["rows_sent"] == looked_up, (after, looked_up)
        assert after["rows_bound"] == 3 * (VOCABULARY + BAG)
        dense = sum(p.numel() * 4 for p in model.module.layers.parameters()) * 3
        sent = after["wire_bytes"] - before["wire_bytes"]
        wanted = dense + looked_up * (WIDTH * 4 + 4)
        assert abs(sent - wanted) < 0.05 * wanted, (sent, wanted)


@check
def buckets_of_our_sizes_leave_the_embeddings_alone():
    """Where the script chooses none: whatever the sizes of the others, rows are aligned as the path asks."""
    theirs = train(plain(Model(outputs=5)))
    with wrapped(Model(outputs=5), **buckets.for_cuda({"module": Model(outputs=5)})) as (ours, communicator):
        train(ours)
        assert_equal(ours.module, theirs.module)
        assert communicator.stats()["rows_bound"] == STEPS * (VOCABULARY + BAG)
        assert {c for c, elements in communicator.asked[-5:] if elements} == {VOCABULARY * WIDTH, BAG * WIDTH}


@check
def what_is_not_aligned_in_a_bucket_of_the_scripts_goes_dense():
    theirs = train(plain(Model(outputs=5)))
    with wrapped(Model(outputs=5), bucket_cap_mb=25) as (ours, communicator):
        train(ours)
        assert_equal(ours.module, theirs.module)
        # Before DDP knew the order of the gradients, the embeddings came first.
        assert communicator.stats()["rows_bound"] <= VOCABULARY + BAG


@check
def every_codec_follows_float64_and_the_way_that_sends_all():
    reference = Model().double()
    optimizer = torch.optim.SGD(reference.parameters(), lr=2.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(SIZE):
            (loss_of(reference, step, rank) / SIZE).backward()
        optimizer.step()
    start = list(Model().parameters())
    for codec, bound in (("none", 3e-4), ("fp16", 5e-3), ("bf16", 4e-2)):
        models = []
        for sparse in ("auto", "off"):
            with settings(codec=codec, sparse_rows=sparse), wrapped(Model()) as (model, communicator):
                models.append(train(model, lr=2.0).module)
                assert_same_on_all_ranks(model)
                assert bool(by_rows(communicator)) == (sparse == "auto")
        assert_equal(*models)
        for p, q, was in zip(models[0].parameters(), reference.parameters(), start):
            error = (p.double() - q).norm() / (q - was.double()).norm()
            assert error < bound, (codec, error.item())


@check
def codecs_with_residuals_keep_their_way():
    for codec in ("topk", "int8"):
        with settings(codec=codec, topk_threshold=0), wrapped(Model()) as (model, communicator):
            train(model, 2)
            assert not by_rows(communicator)


@check
def gradients_of_16_bits():
    for dtype in (torch.float16, torch.bfloat16):
        models = []
        for sparse in ("auto", "off"):
            with settings(sparse_rows=sparse), wrapped(Model().to(dtype)) as (model, communicator):
                models.append(train(model).module)
                assert_same_on_all_ranks(model)
                assert bool(by_rows(communicator)) == (sparse == "auto")
        assert_equal(*models)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, _bag):
        return self.head(self.tokens(tokens))


@check
def a_tied_head_is_dense():
    theirs = train(plain(Tied()))
    with wrapped(Tied()) as (ours, communicator):
        train(ours)
        assert_equal(ours.module, theirs.module)
        assert not by_rows(communicator) and communicator.stats()["rows_bound"] == 0


class Hidden(nn.Module):
    """The weight is used beside the module: nobody can see that its gradient is dense."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens, _bag):
        return self.tokens(tokens) @ self.tokens.weight.t()


@check
def a_hidden_use_adds_up_and_goes_dense():
    theirs = train(plain(Hidden()))
    with wrapped(Hidden()) as (ours, communicator):
        train(ours)
        assert_equal(ours.module, theirs.module)
        # The first step, and DDP makes its buckets anew after it: the name is the weight's, so it is not tried again.
        assert communicator.stats()["rows_bound"] <= 2 * VOCABULARY, communicator.stats()


@check
def accumulation_without_communication():
    ours_and_theirs = []
    with wrapped(Model()) as (ours, _):
        for model in (ours, plain(Model())):
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for step in range(9):
                with model.no_sync() if step % 3 != 2 else contextlib.nullcontext():
                    loss_of(model, step).backward()
                if step % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            ours_and_theirs.append(copy.deepcopy(model.module))
        assert_same_on_all_ranks(ours)
    assert_equal(*ours_and_theirs)


@check
def several_backward_passes_a_step_and_evaluation_between():
    ends = []
    with wrapped(Model()) as (ours, _):
        for model in (ours, plain(Model())):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(6):
                with torch.no_grad():
                    loss_of(model.eval(), 50 + step)
                loss_of(model.train(), step).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append(copy.deepcopy(model.module))
    assert_equal(*ends)


@check
def a_rank_that_skips_the_embedding():
    def loss(model, step):
        return loss_of(model, step, skip=step % SIZE == RANK)

    theirs = train(plain(Model(), find_unused_parameters=True), loss=loss)
    with wrapped(Model(), find_unused_parameters=True) as (ours, communicator):
        train(ours, loss=loss)
        assert_equal(ours.module, theirs.module)
        assert by_rows(communicator)


@check
def without_a_barrier_between_iterations():
    ends = []
    for overlap in (False, True):
        with wrapped(Model(), bucket_cap_mb=0.005) as (model, communicator):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if overlap:
                optimizer = paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")
            for step in range(12):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            if overlap:
                optimizer.synchronize()
            ends.append(copy.deepcopy(list(model.module.parameters())))
            assert_same_on_all_ranks(model)
            assert communicator.stats()["rows_bound"] > 10 * (VOCABULARY + BAG)
    assert all(torch.equal(a, b) for a, b in zip(*ends))


@check
def uneven_inputs():
    ends = []
    for divide in (True, False):
        with wrapped(Model()) as (ours, _):
            for model in (ours, plain(Model())):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with model.join(divide_by_initial_world_size=divide):
                    for step in range(3 + RANK):
                        optimizer.zero_grad()
                        loss_of(model, step).backward()
                        optimizer.step()
                ends.append(copy.deepcopy(model.module))
            assert_same_on_all_ranks(ours)
    for ours, theirs in (ends[:2], ends[2:]):
        for (name, a), b in zip(ours.named_parameters(), theirs.named_parameters()):
            assert torch.allclose(a, b[1], atol=1e-6), name


@check
def a_pass_that_raises_and_one_that_is_computed_twice():
    class Twice(Model):
        def forward(self, tokens, bag):
            mixed = checkpoint(lambda t: self.tokens(t).mean(1), tokens, use_reentrant=False)
            return self.layers(mixed + self.bag(bag))

    theirs = train(plain(Twice()))
    with wrapped(Twice()) as (ours, _):
        with contextlib.suppress(IndexError):
            ours(torch.tensor([[VOCABULARY]]), torch.tensor([[1]]))
        train(ours)
        assert_equal(ours.module, theirs.module)


@check
def not_finite_travels():
    with wrapped(Model()) as (model, communicator):
        loss = loss_of(model, 0)
        if RANK == 1:
            loss = loss * float("inf")
        loss.backward()
        assert communicator.wait_arrival() is False
        tokens, _ = batch(0, 1)
        row = next(t for t in tokens.reshape(-1).tolist() if t != 3)
        assert not torch.isfinite(model.module.tokens.weight.grad[row]).all()


run()
