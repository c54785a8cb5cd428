"""Train in a loop of one's own whose data-loader workers draw random numbers."""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.recovery import seed_data_workers

STEPS, FEATURES = int(sys.argv[1]), 8


class Noise(Dataset[torch.Tensor]):
    """Draws one batch per step, in a worker."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, FEATURES) + index


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Linear(FEATURES, 1)
    training = PlainTraining(caller, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    batches = None
    for step in training.steps(STEPS):
        if batches is None:
            loader = DataLoader(
                Noise(),
                batch_size=None,
                sampler=range(step - 1, STEPS),
                num_workers=2,
                generator=torch.Generator(),
            )
            seed_data_workers(loader, seed=1, rank=dist.get_rank())
            batches = iter(loader)
        loss = (model(next(batches)) + torch.rand(())).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        training.update(loss.item())
    dist.barrier()


main()
