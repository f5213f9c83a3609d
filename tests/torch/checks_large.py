"""A tensor of more than 2 GiB, through the process group."""

import random
from itertools import count

import torch
import torch.distributed as dist
from checks import check, run

import paceline.torch  # noqa: F401

dist.init_process_group("paceline")
RANK = dist.get_rank()
#: Many pieces begin beyond 31 bits.
BYTES = 2**31 + 2**24 + 4099
#: Of no length that divides a power of two: a byte that comes 2 GiB from its place is a wrong one.
PERIOD = 2**20 - 3


def block(rank, seed):
    random_numbers = torch.Generator().manual_seed(seed + rank)
    return torch.randint(0, 127, (PERIOD,), dtype=torch.uint8, generator=random_numbers)


def parts(tensor):
    return tensor.split(PERIOD)


@check
def more_than_two_gib_are_summed_up():
    seed = [random.randrange(2**31)]
    dist.broadcast_object_list(seed)
    tensor = torch.empty(BYTES, dtype=torch.uint8)
    mine = block(RANK, seed[0])
    for part in parts(tensor):
        part.copy_(mine[: len(part)])
    dist.all_reduce(tensor)
    expected = block(0, seed[0]) + block(1, seed[0])
    for at, part in zip(count(0, PERIOD), parts(tensor)):
        assert torch.equal(part, expected[: len(part)]), f"wrong from byte {at} on; seed {seed[0]}"


if __name__ == "__main__":
    run()
