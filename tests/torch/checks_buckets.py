"""The size of DDP's buckets under the one import: the script's, or the setting fusion_threshold."""

import contextlib
import inspect
import os

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, paceline_off, pair, train
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline import _state
from paceline._torch import cores
from paceline._torch.ddp import attachment_of

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
MIB = 2**20
LAYER = 512 * 512 * 4  # bytes; 1 MiB
LAYERS = 12


class Chain(torch.nn.Module):
    """Layers of 1 MiB each, in float32; some may stay unused."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(layers))

    def forward(self, x, unused=()):
        for index, layer in enumerate(self.layers):
            if index not in unused:
                x = torch.tanh(layer(x))
        return x


class TwoKinds(torch.nn.Module):
    """Layers of 3 MiB and of 1 MiB in turn, registered kind by kind."""

    def __init__(self):
        super().__init__()
        self.large = torch.nn.ModuleList(torch.nn.Linear(512, 1536, bias=False) for _ in range(12))
        self.small = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(12))
        self.last = torch.nn.Linear(512, 128, bias=False)

    def forward(self, x):
        for large, small in zip(self.large, self.small):
            x = torch.tanh(small(large(x)[:, :512]))
        return self.last(x)


@contextlib.contextmanager
def setting(name, value):
    os.environ[name] = str(value)
    try:
        yield
    finally:
        del os.environ[name]


def threshold(value):
    return setting("PACELINE_FUSION_THRESHOLD", value)


def backward(model, **arguments):
    torch.manual_seed(RANK)
    (model(torch.randn(2, 512), **arguments) ** 2).mean().backward()


def buckets(model, **arguments):
    """Bytes of each bucket of the third backward pass: DDP has rebuilt its buckets by then."""
    sizes = []
    attachment = attachment_of(model)
    original = attachment.all_reduce

    def spy(bucket):
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return original(bucket)

    attachment.all_reduce = spy
    for _ in range(3):
        sizes.clear()
        model.zero_grad()
        backward(model, **arguments)
    attachment.all_reduce = original
    assert sum(sizes) == sum(p.numel() * p.element_size() for p in model.parameters())
    assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
    return sizes


def assert_about(sizes, cap):
    """A bucket closes when it has reached the cap; the first may be smaller, the last holds what is left."""
    assert max(sizes) < cap + LAYER, sizes
    assert all(size >= cap for size in sizes[1:-1]), sizes
    assert len(sizes) >= sum(sizes) / (cap + LAYER), sizes


@check
def four_mebibytes_where_the_script_gives_none():
    sizes = buckets(DistributedDataParallel(Chain()))
    assert_about(sizes, 4 * MIB)
    assert len(sizes) in (3, 4), sizes


@contextlib.contextmanager
def one_core():
    """All ranks on one core of the machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def cores_as_told(machine, count, share=None):
    original = cores.report
    cores.report = lambda: (machine, 0, frozenset(range(count)), share)
    try:
        yield
    finally:
        cores.report = original


@check
def thirty_two_for_top_k_on_few_cores():
    with setting("PACELINE_CODEC", "topk"), one_core():
        assert cores.for_each_rank(None) == 1 / SIZE
        sizes = buckets(DistributedDataParallel(Chain(layers=40)))
        assert_about(sizes, 32 * MIB)
        assert len(sizes) in (2, 3), sizes
        with threshold(4 * MIB):
            assert_about(buckets(DistributedDataParallel(Chain())), 4 * MIB)


@check
def top_k_leaves_nothing_small_at_the_end():
    """Where DDP takes a size for each bucket."""
    listed = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters
    with setting("PACELINE_CODEC", "topk"), cores_as_told("one machine", 2 * SIZE):
        with setting("PACELINE_TOPK_THRESHOLD", 3 * MIB):
            model = DistributedDataParallel(Chain(layers=13))
            assert model.bucket_bytes_cap == 4 * MIB  # by which torch.compile cuts the graph
            sizes = buckets(model)
            assert (len(sizes), sizes[-1] == 5 * MIB) == ((3, True) if listed else (4, False)), sizes
            # Gradients in another order than that of the parameters: nothing gathers at the end.
            sizes = buckets(DistributedDataParallel(TwoKinds()))
            assert max(sizes) < 8 * MIB, sizes
            sizes = buckets(DistributedDataParallel(Chain(layers=13), find_unused_parameters=True))
            assert len(sizes) == 4, sizes
            # Of two buckets the first would wait for the last gradient; what the user chose stays.
            assert len(buckets(DistributedDataParallel(Chain(layers=5)))) == 2
            with threshold(4 * MIB):
                assert len(buckets(DistributedDataParallel(Chain(layers=13)))) == 4
        for other in (MIB, 64 * MIB):  # the end travels by top-k, or nothing does
            with setting("PACELINE_TOPK_THRESHOLD", other):
                assert len(buckets(DistributedDataParallel(Chain(layers=13)))) == 4


@check
def four_for_top_k_where_each_rank_has_two_cores():
    with setting("PACELINE_CODEC", "topk"):
        with cores_as_told("one machine", 2 * SIZE):
            assert_about(buckets(DistributedDataParallel(Chain())), 4 * MIB)
        with cores_as_told(f"machine {RANK}", 2):
            assert_about(buckets(DistributedDataParallel(Chain())), 4 * MIB)
        with cores_as_told(f"machine {RANK}", 2 - RANK):  # one of them has one core: so have all
            assert_about(buckets(DistributedDataParallel(Chain(layers=40))), 32 * MIB)


@check
def other_codecs_and_sizes_do_not_ask_for_cores():
    with one_core():
        with setting("TIACC_TRAINING_FUSION_THRESHOLD", 6 * MIB), setting("PACELINE_CODEC", "topk"):
            assert_about(buckets(DistributedDataParallel(Chain())), 6 * MIB)
        with setting("PACELINE_CODEC", "fp16"):
            assert_about(buckets(DistributedDataParallel(Chain())), 4 * MIB)


@check
def cores_of_ranks():
    one, both = frozenset({3}), frozenset({3, 4})
    assert cores.fewest([("a", 1, both, None), ("a", 1, both, None)]) == 1
    assert cores.fewest([("a", 1, one, None), ("a", 1, frozenset({4}), None)]) == 1  # each bound to its own
    assert cores.fewest([("a", 1, both, None), ("a", 2, both, None)]) == 1  # two containers share the cores
    assert cores.fewest([("a", 1, both, None), ("b", 1, one, None)]) == 1
    assert cores.fewest([("a", 1, both, 3.0), ("a", 1, both, 3.0)]) == 1
    assert cores.fewest([("a", 1, frozenset(range(16)), 3.0), ("a", 1, frozenset(range(16)), 3.0)]) == 1.5
    assert cores.fewest([("a", 1, frozenset(range(16)), 3.0), ("a", 2, frozenset(range(16)), None)]) == 3
    assert cores.report()[2] == frozenset(os.sched_getaffinity(0))


@check
def the_scripts_size_by_keyword():
    assert_about(buckets(DistributedDataParallel(Chain(), bucket_cap_mb=2)), 2 * MIB)
    assert len(buckets(DistributedDataParallel(module=Chain(), bucket_cap_mb=25))) <= 2
    assert_about(buckets(DistributedDataParallel(module=Chain())), 4 * MIB)


@check
def the_scripts_size_by_position():
    import inspect

    names = list(inspect.signature(DistributedDataParallel.__init__).parameters.values())[2:]
    before = [parameter.default for parameter in names[: [p.name for p in names].index("bucket_cap_mb")]]
    assert_about(buckets(DistributedDataParallel(Chain(), *before, 2)), 2 * MIB)
    assert_about(buckets(DistributedDataParallel(Chain(), *before)), 4 * MIB)


@check
def the_setting_changes_it():
    for size in (2 * MIB, 6 * MIB):
        with threshold(size):
            assert_about(buckets(DistributedDataParallel(Chain())), size)
    with threshold(64 * MIB):
        assert len(buckets(DistributedDataParallel(Chain()))) <= 2
        assert_about(buckets(DistributedDataParallel(Chain(), bucket_cap_mb=3)), 3 * MIB)


@check
def no_fusion_gives_every_parameter_its_bucket():
    small = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])
    with threshold(0):
        for arguments in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            sizes = buckets(DistributedDataParallel(small, **arguments))
            assert sorted(sizes) == [2048] * 3 + [LAYER] * 3, (arguments, sizes)
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == MIB


@check
def a_share_of_all_gradients():
    for name in ("PACELINE_FUSION_BUCKETS", "PERSEUS_ALLREDUCE_FUSION"):
        with setting(name, 4):
            assert_about(buckets(DistributedDataParallel(Chain())), LAYERS // 4 * LAYER)
        with setting(name, 0):
            assert len(buckets(DistributedDataParallel(Chain()))) == LAYERS
    with setting("PACELINE_FUSION_BUCKETS", 2), threshold(3 * MIB):
        assert_about(buckets(DistributedDataParallel(Chain())), 3 * MIB)
    with setting("PACELINE_FUSION_BUCKETS", 6), threshold(3 * MIB):
        assert_about(buckets(DistributedDataParallel(Chain())), 2 * MIB)


@contextlib.contextmanager
def face(name):
    """As under another import: whose family of variables comes first."""
    before, _state.face = _state.face, name
    try:
        yield
    finally:
        _state.face = before


@check
def of_two_families_the_first_has_the_size():
    """As for one setting: PACELINE_*, the face's own, the other families, HOROVOD_*."""
    quarter, each = LAYERS // 4 * LAYER, LAYER
    perseus, horovod = ("PERSEUS_ALLREDUCE_FUSION", 4), ("HOROVOD_FUSION_THRESHOLD", 0)
    tiacc = ("TIACC_TRAINING_FUSION_THRESHOLD", 1)
    for name, first, second, size in (
        ("perseus", perseus, horovod, quarter),
        ("paceline", perseus, horovod, quarter),
        ("perseus", perseus, tiacc, quarter),
        ("tiacc_training", perseus, tiacc, each),
        ("horovod", perseus, horovod, each),
        ("perseus", perseus, ("PACELINE_FUSION_THRESHOLD", 0), each),
        ("horovod", ("PACELINE_FUSION_BUCKETS", 4), horovod, quarter),
        ("paceline", perseus, tiacc, each),  # neither comes first: the smaller
    ):
        with face(name), setting(*first), setting(*second):
            assert_about(buckets(DistributedDataParallel(Chain())), size)


@check
def a_wrong_setting_is_named():
    for value in ("much", "-1", "4K"):
        with threshold(value):
            try:
                DistributedDataParallel(Chain(1))
            except paceline.InvalidArgumentError as error:
                assert "PACELINE_FUSION_THRESHOLD" in str(error), str(error)
            else:
                raise AssertionError(f"{value} passed")
    dist.barrier()


@check
def switched_off_keeps_torchs_size():
    with paceline_off():
        plain = DistributedDataParallel(Chain(1))
    assert plain.bucket_bytes_cap == 25 * MIB, plain.bucket_bytes_cap
    assert DistributedDataParallel(Chain(1)).bucket_bytes_cap == 4 * MIB


@check
def wrong_arguments_get_torchs_own_answer():
    try:
        DistributedDataParallel(Chain(1), no_such_argument=1)
    except TypeError as error:
        assert "no_such_argument" in str(error)
    else:
        raise AssertionError("no TypeError")


@check
def with_a_static_graph():
    assert_about(buckets(DistributedDataParallel(Chain(), static_graph=True)), 4 * MIB)


@check
def with_unused_parameters():
    """No rebuild there: the buckets of the start stay."""
    model = DistributedDataParallel(Chain(), find_unused_parameters=True)
    assert_about(buckets(model, unused=(3, 7)), 4 * MIB)


@check
def trains_as_torchs_own():
    for arguments in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        torch.manual_seed(5)
        ours, plain = pair(Chain(5).double(), **arguments)

        def forward(model, step):
            torch.manual_seed(100 * step + RANK)
            (model(torch.randn(2, 512, dtype=torch.float64)) ** 2).mean().backward()

        train(ours, plain, 2, forward)


if __name__ == "__main__":
    run()
