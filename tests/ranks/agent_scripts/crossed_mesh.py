"""Train over a 2 x 2 mesh with tensors that are replicated along different dimensions of it.

``STEPS [own] [alone] [checksum]``

Ranks 0 and 1 hold the same rows of ``up``, ranks 0 and 2 the same columns of ``down``, and all ranks hold ``bias``.
The optimizer keeps a number for each parameter, which follows from this rank's part of it. With ``own`` each rank
has a bias of its own, which no mesh tells. With ``alone`` each rank holds a part of ``up`` that no other has. With
``checksum`` replicas are compared.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.recovery import CheckpointManager

STEPS, WIDTH, HIDDEN = int(sys.argv[1]), 6, 10
OWN, ALONE, CHECKSUM = ("own" in sys.argv, "alone" in sys.argv, "checksum" in sys.argv)


class Model(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        up, down = torch.randn(HIDDEN, WIDTH) / 4, torch.randn(WIDTH, HIDDEN) / 4
        self.up = torch.nn.Parameter(distribute_tensor(up, mesh, [Shard(0), Shard(1) if ALONE else Replicate()]))
        self.down = torch.nn.Parameter(distribute_tensor(down, mesh, [Replicate(), Shard(1)]))
        self.bias = torch.nn.Parameter(torch.full((WIDTH,), float(dist.get_rank() * OWN)))
        self.register_buffer("seen", torch.zeros(3))  # a rank's own

    def everywhere(self, tensor: torch.Tensor) -> Any:
        return DTensor.from_local(tensor, self.mesh, [Replicate(), Replicate()], run_check=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1 + dist.get_rank())
        hidden = torch.nn.functional.linear(self.everywhere(x), self.up).relu()
        kept = self.everywhere((torch.rand(len(x), HIDDEN) > 0.2).float())
        out: Any = torch.nn.functional.linear(hidden * kept, self.down) + self.everywhere(self.bias)
        whole: torch.Tensor = out.full_tensor()
        return whole


class Normed(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.update()

    def update(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(norm=0.0, momentum=torch.zeros_like(parameter))
                gradient, momentum, own = map(local, (parameter.grad, state["momentum"], parameter))
                state["norm"] = 0.9 * state["norm"] + 0.1 * gradient.norm().item()
                momentum.mul_(0.9).add_(gradient, alpha=1 / (0.1 + state["norm"]))
                own.sub_(momentum, alpha=group["lr"] / 10)


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


@HPWrapper(checkpoint_manager=CheckpointManager(enable_checksum=CHECKSUM))
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(1)
    model = Model(mesh)
    optimizer = Normed(model.parameters())
    torch.manual_seed(100)
    training = PlainTraining(caller, [model], [optimizer])
    for step in training.steps(STEPS):
        caller.enter_phase("data", step)
        x = torch.randn(8, WIDTH)
        caller.enter_phase("forward", step)
        loss = (model(x) - x.flip(1)).square().mean()
        caller.enter_phase("backward", step)
        loss.backward()
        parameters: list[Any] = list(model.parameters())
        for parameter in parameters:
            if hasattr(parameter, "placements"):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        training.update(loss.item())
    numbers = [round(optimizer.state[parameter]["norm"], 9) for parameter in model.parameters()]
    print(f"norms {numbers} seen {model.get_buffer('seen').tolist()}", flush=True)
    dist.barrier()


main()
