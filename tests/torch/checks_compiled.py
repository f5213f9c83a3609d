"""torch.compile by its own compiler, inductor: DDP on Gloo with the import, against plain DDP in float64."""

import torch
import torch.distributed as dist
from checks import check, run
from models import Own, graphs_compiled, mlp, pair, square, train

import paceline.torch  # noqa: F401
from paceline._torch.ddp import attachment_of

dist.init_process_group("gloo")


@check
def compiled_by_inductor():
    ours, plain = pair(Own(mlp(0, widths=(6, 9, 3))))
    communicator = attachment_of(ours).endpoint.communicator
    compiled, operations = torch.compile(ours), []

    def forward(model, step):
        before = communicator.stats()["operations"]
        square(compiled if model is ours else model, step)
        operations.append(communicator.stats()["operations"] - before)

    train(ours, plain, 3, forward)
    assert graphs_compiled() > 0, "torch.compile has passed the model by"
    assert all(operations[::2]) and not any(operations[1::2]), operations


if __name__ == "__main__":
    run()
