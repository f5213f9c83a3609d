"""A rank on the lab: device 0 (or this rank's), Gloo for what torch itself exchanges, helpers that all checks need."""

import contextlib
import os

import torch


def _mine_first():
    """This rank's GPU is device 0, the others come behind it; how many there are.

    Gloo's threads make a context on device 0, whichever device the tensors are on; where ranks share GPUs through MPS,
    contexts on other ranks' devices run out of memory there.
    """
    count = torch.cuda.device_count()  # asks NVML: the driver reads the variable later
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(index) for index in range(count))).split(",")[:count]
    own = int(os.environ["RANK"]) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[own:] + seen[:own])
    return count


_COUNT = _mine_first()

import torch.distributed as dist  # noqa: E402

import paceline.torch  # noqa: E402, F401
from paceline import _cuda  # noqa: E402
from paceline import communicator as core  # noqa: E402

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SLOTS = int(os.environ["PACELINE_LAB_SLOTS"])
NODES, NODE = SIZE // SLOTS, RANK // SLOTS
if _COUNT < SLOTS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
    # Ranks of a node share a GPU: NCCL before 2.30 allows that to what it takes for different hosts.
    os.environ["NCCL_HOSTID"] = f"rank{RANK}"
else:
    os.environ["NCCL_HOSTID"] = f"node{NODE}"
DEVICE = torch.device("cuda", 0)
torch.cuda.set_device(DEVICE)
dist.init_process_group(os.environ.get("CHECKS_BACKEND", "gloo"))
_serial = [0]


def settings(**values):
    """PACELINE_* settings for what is made inside."""

    @contextlib.contextmanager
    def apply():
        names = {f"PACELINE_{name.upper()}": str(value) for name, value in values.items()}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    return apply()


@contextlib.contextmanager
def cuda_communicator(reserve=0, **chosen):
    """A CudaCommunicator over all ranks, with settings, closed at the end."""
    from paceline._torch.stores import TorchStore

    _serial[0] += 1
    with settings(**chosen):
        store = TorchStore(dist.distributed_c10d._get_default_store())
        below = core.Communicator(rank=RANK, size=SIZE, store=store, prefix=f"gpu-test/{_serial[0]}")
        made = _cuda.CudaCommunicator(below, DEVICE.index)
    if reserve:
        made.reserve(reserve, reserve)
    try:
        yield made
        made.wait_arrival()
        torch.cuda.synchronize()
    finally:
        made.close()


def normal(rank, count, salt=0, dtype=torch.float32):
    """What `rank` contributes: the same wherever it is worked out."""
    generator = torch.Generator().manual_seed(7919 * salt + rank)
    return torch.randn(count, generator=generator).to(dtype)


def reduce(made, data, **arguments):
    """All-reduces `data` in place and returns it once the current stream may use it."""
    stream = torch.cuda.current_stream(DEVICE).cuda_stream
    name = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}[data.dtype]
    op = made.all_reduce(data.data_ptr(), data.numel(), _cuda.DTYPES[name], stream, name=b"test", **arguments)
    made.join(op, stream)
    return data


def assert_same_bits(tensor, what=""):
    """All ranks hold the same bits."""
    mine = tensor.detach().cpu().contiguous().view(torch.uint8)
    first = mine.clone()
    dist.broadcast(first, 0)
    different = int((mine != first).sum())
    words = torch.tensor([different])
    dist.all_reduce(words)
    assert words.item() == 0, f"{what}: {words.item()} bytes differ from rank 0's"


def gather(tensor):
    """Every rank's tensor, on the CPU."""
    mine = tensor.detach().cpu().contiguous()
    parts = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(parts, mine)
    return parts


def added(parts):
    """The sum in this order, in the tensors' own dtype; of two there is no other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def of_my_node(parts):
    """This node's of one a rank."""
    return parts[NODE * SLOTS : (NODE + 1) * SLOTS]


def shards(count):
    """(first, end) of each of a node's ranks, as the path divides float32 among them; the last one has what is left."""
    each = count // (SLOTS * 4) * 4
    return [(rank * each, count if rank == SLOTS - 1 else (rank + 1) * each) for rank in range(SLOTS)]
