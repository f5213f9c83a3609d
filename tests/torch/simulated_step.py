"""Steps of a model on a simulated GPU, under whatever settings there are."""

import torch
from simulated_gpu import RANK, wrapped

torch.manual_seed(0)
with wrapped(torch.nn.Linear(600, 600)) as (model, communicator):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 600), RANK + 1.0)).sum().backward()
        optimizer.step()
    assert len(communicator.asked) >= 3, communicator.asked
print("trained by the path for CUDA tensors", flush=True)
torch.distributed.destroy_process_group()
