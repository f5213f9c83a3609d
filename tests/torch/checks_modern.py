"""What only torch 2 has, on init_process_group("paceline") without Gloo: FSDP, functional collectives, compile."""

import copy

import no_gloo  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from checks import check, run
from models import Own, assert_same_on_all_ranks, batch, gradients, graphs_compiled, mlp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from paceline._torch import backend

backend.register()
dist.init_process_group("paceline")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def trained_alone(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        (sum((model(batch(step, 5, 6, rank=r)) ** 2).mean() for r in range(SIZE)) / SIZE).backward()
        optimizer.step()
    return model


def trained(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        (model(batch(step, 5, 6)) ** 2).mean().backward()
        optimizer.step()
    return model


@check
def fully_shard_trains():
    from torch.distributed.fsdp import fully_shard

    model = mlp(0)
    alone = trained_alone(copy.deepcopy(model), 3)
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(model, 3)
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-9, atol=1e-11)


@check
def fsdp1_trains():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = mlp(1)
    alone = trained_alone(copy.deepcopy(model), 3)
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    trained(sharded, 3)
    with FullyShardedDataParallel.summon_full_params(sharded):
        for mine, theirs in zip(sharded.parameters(), alone.parameters()):
            torch.testing.assert_close(mine.view_as(theirs), theirs, rtol=1e-9, atol=1e-11)


def of_every_rank(count, salt=0):
    """What each rank has: random, and known to all."""
    return [torch.randn(count, generator=torch.Generator().manual_seed(1000 * salt + r)) for r in range(SIZE)]


def assert_sum(result, parts):
    torch.testing.assert_close(result.double(), sum(part.double() for part in parts), rtol=1e-5, atol=1e-6)


@check
def functional_collectives():
    parts = of_every_rank(4)
    assert_sum(functional.all_reduce(parts[RANK], "sum", dist.group.WORLD), parts)
    gathered = functional.all_gather_tensor(parts[RANK], 0, dist.group.WORLD)
    assert torch.equal(functional.wait_tensor(gathered), torch.cat(parts))
    parts = of_every_rank(2 * SIZE, salt=1)
    scattered = functional.reduce_scatter_tensor(parts[RANK], "sum", 0, dist.group.WORLD)
    assert_sum(functional.wait_tensor(scattered), [part[2 * RANK : 2 * RANK + 2] for part in parts])
    exchanged = functional.all_to_all_single(parts[RANK], None, None, dist.group.WORLD)
    assert torch.equal(functional.wait_tensor(exchanged), torch.cat([part[2 * RANK : 2 * RANK + 2] for part in parts]))


@check
def what_is_not_offered_says_so():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if hasattr(backend, "supports_splitting"):
        for refused in (lambda: dist.split_group(None, [list(range(SIZE))]), lambda: dist.shrink_group([SIZE - 1])):
            try:
                refused()
            except RecursionError:
                raise
            except (RuntimeError, TypeError) as error:
                assert "support" in str(error), error
            else:
                raise AssertionError("no error")
    if hasattr(type(backend), "Options"):
        assert backend.options._timeout == dist.distributed_c10d.default_pg_timeout


@check
def device_meshes_and_dtensors():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("outer", "inner"))
    parts = of_every_rank(20, salt=2)
    tensor = parts[RANK].clone()
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    assert_sum(tensor, parts)
    torch.manual_seed(0)
    whole = torch.randn(8, 6)
    sharded = distribute_tensor(whole, mesh["inner"], [Shard(0)])
    torch.testing.assert_close((sharded * 2).redistribute(placements=[Replicate()]).to_local(), whole * 2)


@check
def compiled_ddp():
    model = DistributedDataParallel(Own(mlp(2)))
    alone = trained_alone(copy.deepcopy(model.module), 3)
    graphs = graphs_compiled()
    trained(torch.compile(model, backend="aot_eager"), 3)
    assert graphs_compiled() > graphs
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    assert_same_on_all_ranks(list(model.parameters()))


@check
def compiled_ddp_by_import():
    import paceline.torch  # noqa: F401
    from paceline._torch.ddp import attachment_of

    model = DistributedDataParallel(Own(mlp(3)))
    alone = trained_alone(copy.deepcopy(model.module), 3)
    torch.compiler.reset()  # not compiled_ddp's graph again
    before, graphs = attachment_of(model).endpoint.communicator.stats()["operations"], graphs_compiled()
    trained(torch.compile(model, backend="aot_eager"), 3)
    assert graphs_compiled() > graphs
    assert attachment_of(model).endpoint.communicator.stats()["operations"] > before
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@check
def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = mlp(4, torch.float64, (6, 4 * SIZE, 3))
    alone = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = batch(0, 5, 6, rank=0)
    torch.testing.assert_close(model(x), alone(x))
    model(x).pow(2).mean().backward()
    alone(x).pow(2).mean().backward()
    for mine, theirs in zip(gradients(model), gradients(alone)):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@check
def distributed_checkpoints():
    import tempfile

    import torch.distributed.checkpoint as checkpoint

    model = DistributedDataParallel(mlp(5))
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    checkpoint.save({"model": model.module.state_dict()}, checkpoint_id=folder[0])
    other = mlp(6)
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    for mine, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(mine, theirs)
    dist.barrier()
    if RANK == 0:
        import shutil

        shutil.rmtree(folder[0])


if __name__ == "__main__":
    run()
