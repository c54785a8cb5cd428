"""Draw training scripts as people write them: a few habits that keep the contract, and perhaps one that breaks it.

Habits come from public repositories and issues: averages and lists in variables and attributes, loss scalers,
persistent workers, loggers, threads, what a process can do only once. A habit is lines for places of a template.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Habit:
    """A few lines that many scripts have.

    Attributes:
        name: what it is.
        lines: the lines by place of the template.
        breaks: the point of docs/contract.md that it breaks; 0: it keeps all.
        excludes: names of habits that cannot stand in the same script.
    """

    name: str
    lines: Mapping[str, Sequence[str]]
    breaks: int = 0
    excludes: Sequence[str] = field(default=())


LOOP = """
import os
import random
import threading
from collections import deque

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from checkpointless import HPWrapper, PlainTraining, Value
from checkpointless.recovery import seed_data_workers

#imports
STEPS, BATCH = 12, 4


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
        #dataset

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        #item
        return row


def batches(loader, sampler, done):
    epoch, made = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= made:
                yield batch
        epoch, made = epoch + 1, 0


#functions


@HPWrapper()
def main():
    #once
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    random.seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    rows = Rows()
    sampler = DistributedSampler(rows)
    workers = {}
    #loader
    loader = DataLoader(rows, BATCH, sampler=sampler, generator=torch.Generator(), **workers)
    seed_data_workers(loader, seed=5, rank=rank)
    modules, state, more = [model], {}, {}
    #build
    training = PlainTraining(modules=modules, optimizers=[optimizer], state=state, **more)
    stream = None
    #before_loop
    for step in training.steps(STEPS):
        #begin
        stream = stream or batches(loader, sampler, step - 1)
        x = next(stream)
        #batch
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        #loss
        optimizer.zero_grad()
        loss.backward()
        #gradients
        training.update(loss)
    #end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

LOOP_HABITS = (
    Habit(
        "a schedule",
        {
            "build": [
                'more["schedulers"] = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)]',
            ],
        },
    ),
    Habit(
        "norms, declared",
        {
            "build": [
                'norms = state["norms"] = []',
            ],
            "gradients": [
                "norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))",
                "norms.append(norm)",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), sorted(norms)[len(norms) // 2])",
            ],
        },
        excludes=("norms, undeclared",),
    ),
    Habit(
        "a window, declared",
        {
            "build": [
                'window = state["window"] = deque(maxlen=3)',
            ],
            "loss": [
                "window.append(loss.item())",
                "loss = loss / max(1.0, max(window))",
            ],
        },
    ),
    Habit(
        "an average, declared",
        {
            "build": [
                'mean = state["mean"] = Value(0.0)',
            ],
            "loss": [
                "mean.value = 0.9 * mean.value + 0.1 * loss.item()",
                "loss = loss * (1.0 + mean.value)",
            ],
        },
    ),
    Habit(
        "a loss scaler, declared",
        {
            "build": [
                'scaler = more["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)',
            ],
            "loss": [
                "loss = loss + 0.0 * scaler.get_scale() + 1e-4 * scaler.get_scale() * model.module[2].bias.sum()",
            ],
            "gradients": [
                "scaler.unscale_(optimizer)",
                "scaler.update()",
            ],
            "begin": [
                "scaler.scale(torch.ones(1))",
            ],
        },
    ),
    Habit(
        "a generator, declared",
        {
            "build": [
                'noise = state["noise"] = torch.Generator().manual_seed(rank)',
            ],
            "batch": [
                "x = x + 0.1 * torch.randn(x.shape, generator=noise)",
            ],
        },
    ),
    Habit(
        "workers that augment",
        {
            "loader": [
                'workers = {"num_workers": 1}',
            ],
            "item": [
                "row = row + 0.1 * torch.randn(8)",
            ],
        },
        excludes=("persistent workers that augment",),
    ),
    Habit(
        "persistent workers that augment",
        {
            "loader": [
                'workers = {"num_workers": 1, "persistent_workers": True}',
            ],
            "item": [
                "row = row + 0.1 * torch.randn(8)",
            ],
        },
    ),
    Habit(
        "a thread that logs",
        {
            "before_loop": [
                "lines = deque()",
                "threading.Thread(target=lambda: lines.clear(), daemon=True).start()",
            ],
            "gradients": [
                "lines.append(loss.item())",
            ],
        },
    ),
    Habit(
        "a log file",
        {
            "before_loop": [
                'log = open(f"losses-{rank}.log", "a")',
            ],
            "gradients": [
                "print(step, loss.item(), file=log, flush=True)",
            ],
        },
    ),
    Habit(
        "Python's random numbers",
        {
            "batch": [
                "x = x * random.uniform(0.9, 1.1)",
            ],
        },
    ),
    Habit(
        "two groups of parameters",
        {
            "build": [
                'optimizer.param_groups[0]["weight_decay"] = 0.1',
                'optimizer.add_param_group({"params": [extra := torch.nn.Parameter(torch.ones(1))]})',
                "modules.append(torch.nn.ParameterList([extra]))",
            ],
            "loss": [
                "loss = loss + (extra.sum() - 2.0) ** 2",
            ],
            "gradients": [
                "dist.all_reduce(extra.grad)  # DDP does not know it",
            ],
        },
    ),
    Habit(
        "a start method, set once",
        {
            "once": [
                'torch.multiprocessing.set_start_method("fork")',
            ],
        },
    ),
    Habit(
        "a registry, filled once",
        {
            "imports": [
                "REGISTRY = {}",
            ],
            "functions": [
                "def register(name, value):",
                "    if name in REGISTRY:",
                '        raise ValueError(f"{name} is registered already")',
                "    REGISTRY[name] = value",
            ],
            "once": [
                'register("rows", Rows)',
            ],
        },
    ),
    Habit(
        "a folder of results",
        {
            "once": [
                'os.makedirs("results", exist_ok=True)',
                'os.chdir("results")',
            ],
        },
    ),
    # What breaks the contract.
    Habit(
        "norms, undeclared",
        {
            "build": [
                "norms = []",
            ],
            "gradients": [
                "norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))",
                "norms.append(norm)",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), sorted(norms)[len(norms) // 2])",
            ],
        },
        breaks=3,
    ),
    Habit(
        "an average, undeclared",
        {
            "build": [
                "average = 0.0",
            ],
            "loss": [
                "average = 0.9 * average + 0.1 * loss.item()",
                "loss = loss * (1.0 + average)",
            ],
        },
        breaks=3,
    ),
    Habit(
        "a loss scaler, undeclared",
        {
            "build": [
                'undeclared = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)',
            ],
            "begin": [
                "undeclared.scale(torch.ones(1))",
            ],
            "loss": [
                "loss = loss + 1e-4 * undeclared.get_scale() * model.module[2].bias.sum()",
            ],
            "gradients": [
                "undeclared.unscale_(optimizer)",
                "undeclared.update()",
            ],
        },
        breaks=3,
        excludes=("a loss scaler, declared",),
    ),
    Habit(
        "a generator, undeclared",
        {
            "build": [
                "drawn = torch.Generator().manual_seed(rank)",
            ],
            "batch": [
                "x = x + 0.1 * torch.randn(x.shape, generator=drawn)",
            ],
        },
        breaks=3,
    ),
    Habit(
        "an object with a state of its own",
        {
            "functions": [
                "class Meter:",
                "    def __init__(self):",
                "        self.total = 0.0",
                "",
                "    def add(self, value):",
                "        self.total += value",
                "        return self.total",
            ],
            "build": [
                "meter = Meter()",
            ],
            "loss": [
                "loss = loss * (1.0 + 0.01 * meter.add(loss.item()))",
            ],
        },
        breaks=3,
    ),
    Habit(
        "an iterator from before the loop",
        {
            "before_loop": [
                "stream = batches(loader, sampler, 0)",
            ],
        },
        breaks=5,
    ),
    Habit(
        "a dataset with a generator",
        {
            "dataset": [
                "self.noise = torch.Generator().manual_seed(4)",
            ],
            "item": [
                "row = row + 0.1 * torch.randn(8, generator=self.noise)",
            ],
        },
        breaks=5,
        excludes=("workers that augment", "persistent workers that augment"),
    ),
    Habit(
        "a global that counts",
        {
            "imports": [
                "CALLS = [0]",
            ],
            "loss": [
                "CALLS[0] += 1",
                "loss = loss * (1.0 + 0.01 * CALLS[0])",
            ],
        },
        breaks=4,
    ),
    Habit(
        "a file that counts",
        {
            "begin": [
                'seen = int(open(f"seen-{os.getpid()}").read()) if os.path.exists(f"seen-{os.getpid()}") else 0',
                'print(seen + 1, file=open(f"seen-{os.getpid()}", "w"), flush=True)',
            ],
            "loss": [
                "loss = loss * (1.0 + 0.01 * seen)",
            ],
        },
        breaks=4,
    ),
)

LIGHTNING = """
import os
import random
from collections import deque

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from checkpointless import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy

#imports


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
        #dataset

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        #item
        return row


#functions


class Mine(Callback):
    def __init__(self):
        super().__init__()
        self.factor = 1.0
        #callback

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        pass
        #callback_begin

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass
        #callback_end

    #callback_hooks


class Model(pl.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
        #attributes

    def training_step(self, batch, batch_idx):
        x = batch
        #batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        #loss
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        #optimizer
        return optimizer

    #hooks


@HPWrapper()
def main():
    #once
    pl.seed_everything(3, verbose=False)
    model, mine = Model(), Mine()
    workers, validation, options = {}, {}, {}
    #trainer
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        val_check_interval=3,
        strategy=CheckpointlessDDPStrategy(),
        callbacks=[mine],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    rows = Rows()
    trainer.fit(
        model,
        DataLoader(rows, 4, shuffle=True, **workers),
        DataLoader(rows, 8, **validation),
    )


if __name__ == "__main__":
    main()
"""

LIGHTNING_HABITS = (
    Habit(
        "a schedule",
        {
            "optimizer": [
                "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)",
                'return [optimizer], [{"scheduler": schedule, "interval": "step"}]',
            ],
        },
    ),
    Habit(
        "outputs of an epoch in a list",
        {
            "attributes": [
                "self.outputs, self.epoch_mean = [], 1.0",
            ],
            "loss": [
                "self.outputs.append(loss.detach())",
                "loss = loss * self.epoch_mean",
            ],
            "hooks": [
                "def on_train_epoch_end(self):",
                "    self.epoch_mean = float(torch.stack(self.outputs).mean())",
                "    self.outputs.clear()",
            ],
        },
    ),
    Habit(
        "an average that begins as None",
        {
            "attributes": [
                "self.average = None",
            ],
            "loss": [
                "now = loss.item()",
                "self.average = now if self.average is None else 0.9 * self.average + 0.1 * now",
                "loss = loss * (1.0 + self.average)",
            ],
        },
    ),
    Habit(
        "norms in a list",
        {
            "attributes": [
                "self.norms = []",
            ],
            "hooks": [
                "def configure_gradient_clipping(self, optimizer, *args, **kwargs):",
                "    self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 1e9)))",
                "    torch.nn.utils.clip_grad_norm_(self.parameters(), sorted(self.norms)[len(self.norms) // 2])",
            ],
        },
    ),
    Habit(
        "a factor of a callback",
        {
            "callback_end": [
                'self.factor = 0.9 * self.factor + 0.1 * float(outputs["loss"])',
            ],
            "callback_begin": [
                "module.factor = self.factor",
            ],
            "attributes": [
                "self.factor = 1.0",
            ],
            "loss": [
                "loss = loss * self.factor",
            ],
        },
    ),
    Habit(
        "a callback with a state of its rank",
        {
            "callback": [
                'self.sum = {"sum": 0.0}',
            ],
            "callback_end": [
                'self.sum = {"sum": self.sum["sum"] + float(outputs["loss"])}',
                'module.total = self.sum["sum"]',
            ],
            "callback_hooks": [
                "def state_dict(self):",
                "    return dict(self.sum)",
                "",
                "def load_state_dict(self, state_dict):",
                "    self.sum = dict(state_dict)",
            ],
            "attributes": [
                "self.total = 0.0",
            ],
            "loss": [
                "loss = loss * (1.0 + 0.01 * self.total)",
            ],
        },
    ),
    Habit(
        "workers that augment",
        {
            "trainer": [
                'workers = {"num_workers": 1, "persistent_workers": True}',
            ],
            "item": [
                "row = row + 0.1 * torch.randn(8)",
            ],
        },
    ),
    Habit(
        "a validation with persistent workers",
        {
            "trainer": [
                'validation = {"num_workers": 1, "persistent_workers": True}',
            ],
        },
    ),
    Habit(
        "accumulated gradients",
        {
            "trainer": [
                'options["accumulate_grad_batches"] = 2',
            ],
        },
    ),
    Habit(
        "clipped gradients",
        {
            "trainer": [
                'options["gradient_clip_val"] = 0.5',
            ],
        },
        excludes=("norms in a list",),
    ),
    Habit(
        "a window",
        {
            "attributes": [
                "self.window = deque(maxlen=3)",
            ],
            "loss": [
                "self.window.append(loss.item())",
                "loss = loss / max(1.0, max(self.window))",
            ],
        },
    ),
    Habit(
        "Python's random numbers",
        {
            "batch": [
                "x = x * random.uniform(0.9, 1.1)",
            ],
        },
    ),
    Habit(
        "a buffer",
        {
            "attributes": [
                'self.register_buffer("count", torch.zeros(1))',
            ],
            "loss": [
                "self.count += 1",
                "loss = loss * (1.0 + 0.01 * self.count.item())",
            ],
        },
    ),
    Habit(
        "a start method, set once",
        {
            "once": [
                'torch.multiprocessing.set_start_method("fork")',
            ],
        },
    ),
    Habit(
        "a folder of results",
        {
            "once": [
                'os.makedirs("results", exist_ok=True)',
                'os.chdir("results")',
            ],
        },
    ),
    # What breaks the contract.
    Habit(
        "an object with a state of its own",
        {
            "functions": [
                "class Meter:",
                "    def __init__(self):",
                "        self.total = 0.0",
                "",
                "    def add(self, value):",
                "        self.total += value",
                "        return self.total",
            ],
            "attributes": [
                "self.meter = Meter()",
            ],
            "loss": [
                "loss = loss * (1.0 + 0.01 * self.meter.add(loss.item()))",
            ],
        },
        breaks=2,
    ),
    Habit(
        "an attribute of a module inside",
        {
            "attributes": [
                "self.net[0].calls = 0",
            ],
            "loss": [
                "self.net[0].calls += 1",
                "loss = loss * (1.0 + 0.01 * self.net[0].calls)",
            ],
        },
        breaks=2,
    ),
    Habit(
        "an attribute that is too large",
        {
            "attributes": [
                "self.large = torch.zeros(400_000)",
            ],
            "loss": [
                "self.large += loss.item()",
                "loss = loss * (1.0 + 0.01 * float(self.large[0]))",
            ],
        },
        breaks=2,
    ),
    Habit(
        "a dataset with a generator",
        {
            "dataset": [
                "self.noise = torch.Generator().manual_seed(4)",
            ],
            "item": [
                "row = row + 0.1 * torch.randn(8, generator=self.noise)",
            ],
        },
        breaks=5,
        excludes=("workers that augment",),
    ),
    Habit(
        "a global that counts",
        {
            "imports": [
                "CALLS = [0]",
            ],
            "loss": [
                "CALLS[0] += 1",
                "loss = loss * (1.0 + 0.01 * CALLS[0])",
            ],
        },
        breaks=4,
    ),
)


_HABITS = 4  # of a script
_KINDS = (("loop", LOOP, LOOP_HABITS), ("lightning", LIGHTNING, LIGHTNING_HABITS))


@dataclass(frozen=True)
class Script:
    """A script that was drawn.

    Attributes:
        name: its number and its kind.
        text: the script.
        habits: the names of its habits.
        breaks: the point of the contract that it breaks; 0: none.
    """

    name: str
    text: str
    habits: tuple[str, ...]
    breaks: int


def draw(count: int, seed: int) -> list[Script]:
    """Draw scripts, half of them with one habit that breaks the contract, half of them loops, half Lightning."""
    source = random.Random(seed)
    return [_draw_one(source, number) for number in range(count)]


def _draw_one(source: random.Random, number: int) -> Script:
    kind, template, habits = _KINDS[number % 2]
    chosen = [source.choice([each for each in habits if each.breaks])] if number % 4 >= 2 else []
    keeping = [each for each in habits if not each.breaks]
    for each in source.sample(keeping, k=len(keeping)):
        taken = {name for other in chosen for name in (other.name, *other.excludes)}
        if len(chosen) < _HABITS and each.name not in taken and taken.isdisjoint(each.excludes):
            chosen.append(each)
    names, breaks = tuple(each.name for each in chosen), max(each.breaks for each in chosen)
    return Script(f"{number:02d}-{kind}", fill(template, chosen), names, breaks)


def fill(template: str, habits: Sequence[Habit]) -> str:
    """Return the script that ``template`` becomes with ``habits``, line by line at their places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for habit in habits:
        for place, more in habit.lines.items():
            places[place] += more
    lines = []
    for line in template.strip("\n").splitlines():
        stripped = line.lstrip()
        if stripped.startswith("#"):
            indent = line[: len(line) - len(stripped)]
            lines += [f"{indent}{each}" if each else "" for each in places[stripped[1:]]]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"
