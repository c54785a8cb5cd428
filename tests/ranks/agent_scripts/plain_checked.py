"""Train layers of several kinds in DDP, two micro-batches a step, with gradients checked: ``STEPS EVERY [WAY]``.

Ways: ``random``: the pass draws numbers that nobody puts back; ``forgets``: it is run outside of checked();
``waits``: step 6 lasts until ranks are to pause.
"""

import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])
WAY = sys.argv[3] if len(sys.argv) > 3 else ""
WIDTH = 12


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.convolution = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.batch_norm = torch.nn.BatchNorm1d(WIDTH)
        self.layer_norm = torch.nn.LayerNorm(WIDTH)
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(WIDTH, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.batch_norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        if WAY == "random":
            x = x * (1 + torch.frombuffer(os.urandom(1), dtype=torch.uint8) / 1000)
        return self.last(self.drop(torch.relu(self.layer_norm(x))))


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())
    passes = [0]  # which the pass itself changes
    training = PlainTraining(caller, [model], [optimizer], state={"passes": passes}, sdc_check_every=EVERY)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        passes[0] += 1
        (loss * (1 + passes[0] / 100)).backward()
        return loss

    for step in training.steps(STEPS):
        with model.no_sync():
            compute(torch.randint(20, (4, 6)))
        run = partial(compute, torch.randint(20, (4, 6)))
        loss = run() if WAY == "forgets" else training.checked(run)
        deadline_s = time.monotonic() + 120
        while WAY == "waits" and step == 6 and caller.generation == 2 and not caller.pause.is_wanted:
            assert time.monotonic() < deadline_s, "no node moves"
            caller.beat()
            time.sleep(0.005)
        training.update(loss.item())
    dist.barrier()


main()
