"""A world of backend "paceline" without Gloo, and random data whose sums every rank can work out.

What a rank contributes follows from (check, rank), so every rank knows what the others sent.
"""

import datetime
import itertools
import os

import no_gloo  # noqa: F401
import torch
import torch.distributed as dist

from paceline._torch import backend, process_group

backend.register()
if os.environ.get("CHECKS_WHOLE_GROUP"):  # as torch 2.0 to 2.14 need it, whose Backend has no constructor for Python
    process_group._IS_BACKEND = False
MODERN = hasattr(torch, "compile")
dist.init_process_group("paceline", timeout=datetime.timedelta(seconds=60))
#: Whether this torch takes backends made in Python; otherwise they are whole process groups.
BACKENDS = not type(dist.group.WORLD).__name__.startswith("Paceline")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
ROUNDING = {torch.float32: 2**-23, torch.float64: 2**-52, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SERIAL = itertools.count()


def data(rank, shape, dtype=torch.float32, salt=0):
    """What `rank` has: random, and known to all."""
    generator = torch.Generator().manual_seed(7919 * salt + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex:
        parts = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 11, shape, generator=generator).to(dtype)


def everyone(shape, dtype=torch.float32, salt=0):
    return [data(r, shape, dtype, salt) for r in range(SIZE)]


def assert_sum(result, parts, dtype, divide=1):
    """Within SIZE roundings of the exact sum; integers exactly, modulo their width."""
    if not (dtype.is_floating_point or dtype.is_complex):
        assert torch.equal(result, sum(p.long() for p in parts).to(dtype))
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = sum(p.to(wide) for p in parts) / divide
    bound = sum(p.to(wide).abs() for p in parts) * SIZE * ROUNDING.get(dtype, 2**-23)
    assert bool(((result.to(wide) - exact).abs() <= bound).all())


def assert_same_everywhere(tensor):
    copies = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(copies, tensor)
    for copy in copies:
        assert torch.equal(copy, copies[0])


def raises(kind, part, function):
    try:
        function()
    except kind as error:
        assert part in str(error), str(error)
        return error
    raise AssertionError(f"no {kind.__name__}")
