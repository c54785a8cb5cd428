"""Train a transformer in DDP and time steps with and without a check of gradients, in turns."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gradient_check.model import build, loss_of
from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, EVERY, BATCHES, RESULT = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
WIDTH, LAYERS, VOCABULARY, TOKENS, ROWS = 256, 4, 4096, 64, 8
WARM_UP = 2 * EVERY


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    """Write the times of the steps of rank 0."""
    is_on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_on_gpu else "gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(build(WIDTH, LAYERS, VOCABULARY).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    training = PlainTraining(caller, [model], [optimizer], sdc_check_every=EVERY)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    taken: dict[bool, list[float]] = {True: [], False: []}
    for step in training.steps(STEPS):
        began_s = time.perf_counter()
        for _ in range(BATCHES - 1):
            with model.no_sync():
                compute(torch.randint(VOCABULARY, (ROWS, TOKENS), device=device))
        loss = training.checked(partial(compute, torch.randint(VOCABULARY, (ROWS, TOKENS), device=device)))
        training.update(loss.item())
        if step > WARM_UP:
            taken[step % EVERY == 0].append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        checked_s, plain_s = statistics.median(taken[True]), statistics.median(taken[False])
        RESULT.write_text(json.dumps({"checked_s": checked_s, "plain_s": plain_s, "checks": len(taken[True])}))
    dist.barrier()


main()
