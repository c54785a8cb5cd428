"""Test the command line: what each command makes of its words, and what it says of wrong ones."""

import importlib
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from checkpointless.cli import command as command_module
from checkpointless.cli import main
from checkpointless.cli.command import say
from checkpointless.doctor import node
from checkpointless.doctor.node import _Torch
from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import FaultKind, FaultPhase, parse
from checkpointless.launcher.agent import launch as launch_module
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.telemetry.events import EVENTS_FILE
from checkpointless.observability.telemetry.steps import StepLog
from checkpointless.testing.demo import trainers as demo
from checkpointless.testing.demo.trainers import TRAINERS, Task
from tests.unit.cli.conftest import Refused, words_of

LAUNCH_CODE = 7  # of what would have been launched
CHECK, LIMIT = "CHECKPOINTLESS_DEVICE_CHECK", "CHECKPOINTLESS_DEVICE_CHECK_TIMEOUT"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "COMMAND"),
        ("runn", "invalid choice: 'runn'"),
        ("run", "SCRIPT"),
        ("run nowhere.py", "nowhere.py"),
        ("run --nproc-per-node 0 train.py", "at least 1"),
        ("run --nproc-per-node two train.py", "at least 1"),
        ("run --heartbeat-timeout -1 train.py", "above 0"),
        ("run --max-incidents -1 train.py", "at least 0"),
        ("run --http-port 65536 train.py", "not a port"),
        ("run --http-port http train.py", "at least 0"),
        ("run --http-host 0.0.0.0 train.py", "--http-port"),
        ("run --no-such-option train.py", "--no-such-option"),
        ("run --preload no_such_module_anywhere train.py", "no_such_module_anywhere"),
        ("run --run-dir train.py train.py", "train.py"),
        ("run --run-dir . train.py", "not empty"),
        ("run --log-dir train.py train.py", "train.py"),
        ("run --log-bytes 1T train.py", "'1T' is not a number of bytes of at least 64K, such as 1G"),
        ("run --log-bytes 63K train.py", "'63K' is not a number of bytes"),
        ("run --log-bytes '' train.py", "'' is not a number of bytes"),
        ("run --fault sigkil:rank=0,step=1 train.py", "did you mean 'sigkill'"),
        ("run --fault sigkill:rank=1,step=1 train.py", "rank 1 is not one of the 1 ranks"),
        ("run --fault cuda@forward:rank=0,step=1 train.py", "CUDA is not available"),
        ("run --cpu --fault cuda@forward:rank=0,step=1 train.py", "CUDA is not available"),
        ("run --nproc-per-node 4 --fault node@forward:rank=3,step=2 train.py", "--nnodes"),
        ("demo --steps 0", "at least 1"),
        ("demo --steps 5 --fault sigkill:rank=1,step=6", "step 6 never comes"),
        ("demo --layout zz=2", "'zz=2'"),
        ("demo --dropout 1.5", "--dropout"),
        ("demo --nproc 3 --fault sigkill:rank=1,step=1", "--nproc 3"),
        ("demo --nproc 1", "from 2 to 32"),
        ("demo --nproc 33", "from 2 to 32"),
        ("demo --nproc 16 --layout tp=8", "4 attention heads"),
        ("demo --nproc 6 --layout pp=3", "4 layers"),
        ("demo --nproc 6 --layout ep=3", "4 experts"),
        ("demo --layout cp=2", "TransformerEngine"),
        ("demo --nproc 8 --layout tp=2,ep=2", "use one of the two"),
        ("demo --run-dir train.py", "train.py is a file"),
        ("demo --run-dir train.py/below", "Not a directory"),
        ("verify nowhere", "RUN_B"),
        ("verify nowhere nowhere", "no run directory nowhere"),
        ("verify . .", "--record-steps"),
        ("report nowhere", "no run directory nowhere"),
        ("report .", EVENTS_FILE),
        ("run --no-python train.py", "give a Python script, or -m MODULE"),
        ("run --virtual-local-rank train.py", "LOCAL_RANK"),
        ("run --rdzv-backend etcd train.py", "--rdzv-backend etcd is not supported"),
        ("run --nnodes 1:4 train.py", "--nnodes 4, or --nnodes 1 with --spares"),
        ("run --nnodes 4:2 train.py", "the number of nodes is fixed here"),
        ("run --nnodes 1:x train.py", "'x' is not a whole number"),
        ("run --standalone --nnodes 2 train.py", "--standalone is for one node"),
        ("run --standalone --spares 1 train.py", "--standalone is for one node"),
        ("run --nnodes 2 --master-port 1234 train.py", "needs --master-addr"),
        ("run --master-port 65536 train.py", "not a port"),
        ("run --rdzv-conf timeout train.py", "'timeout' is not KEY=VALUE"),
        ("run --rdzv-conf join_timeout=0 train.py", "above 0"),
        ("run --nproc-per-node gpu train.py", "this machine has no GPU"),
        ("run --nproc-per-node xpu train.py", "neither a whole number of at least 1 nor gpu, cpu or auto"),
        ("run --nproc-per-node 2 --local-ranks-filter 2 train.py", "from 0 to 1"),
        ("run --local-ranks-filter a train.py", "'a' is not a whole number"),
        ("run --nproc-per-nod 2 train.py", "did you mean --nproc-per-node? (see `checkpointless run --help`)"),
        ("PET_NNODES=x run train.py", "error: PET_NNODES=x: "),
        ("PET_NPROC_PER_NODE=0 run train.py", "error: PET_NPROC_PER_NODE=0: "),
        ("PET_STANDALONE=yes run train.py", "error: PET_STANDALONE=yes: "),
        ("run --device-check no-such train.py", "'no-such' cannot be run: there is no such program"),
        (f"""{CHECK}="sh -c 'x" run train.py""", "cannot be run: No closing quotation"),
        ("run --device-check true --device-check-timeout 0 train.py", "above 0"),
        (f"{CHECK}=true {LIMIT}=x run t.py", "--device-check-timeout: 'x' is not a number of seconds above 0"),
        (f"{CHECK}=true {LIMIT}=120 run train.py", "120 s must be less than --regroup-timeout, 120 s"),
        ("doctor trainer.max_steps=3", "unrecognized arguments"),
        ("doctor -m", "-m requires --script"),
        ("doctor --script nowhere.py", "nowhere.py"),
        ("doctor --json /no/such/folder/x", "cannot write /no/such/folder/x"),
        ("rehearse nothing.py", "there is no script 'nothing.py'"),
        ("rehearse -m no_such_module", "there is no module 'no_such_module'"),
        ("rehearse --steps 0 train.py", "--steps"),
        ("rehearse tiny_gpt_cpu --step 3", "--step"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    command: str, says: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.Trainer, "require", lambda _: None)  # the demo looks first whether there is NeMo
    monkeypatch.setattr(command_module, "_count_cuda", lambda: 0)
    monkeypatch.setattr(node, "_torch", _Torch)
    assert says in refused(command)


@pytest.mark.parametrize("command", ["run", "train", "coordinator", "demo", "verify", "report", "faults", "doctor"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: checkpointless {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "what", [["run", "train.py"], pytest.param(["train", "tiny_gpt_cpu", "--cpu"], marks=pytest.mark.nemo)]
)
def test_a_node_can_be_lost_in_a_job_of_two(what: list[str], launched: list[LaunchConfig], tmp_path: Path) -> None:
    command, *rest = what
    fault = ["--fault", "node@forward:rank=3,step=2"]
    several = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:4000"]
    shared = tmp_path / "run"
    shared.mkdir()
    (shared / "events.jsonl").write_text("{}\n")  # another node was quicker
    assert main([command, *several, *fault, "--run-dir", str(shared), *rest]) == 7
    (config,) = launched
    assert (config.nnodes, config.node_rank, config.endpoint, config.token) == (2, 1, ("node0", 4000), "x" * 32)
    assert "CHECKPOINTLESS_TOKEN" not in os.environ


def test_the_demo_fits_its_batch_to_its_ranks() -> None:
    def task(nproc: int, layout: str = "") -> Task:
        return Task(nproc, 3, TRAINERS["nemo"].layout(layout))

    def batch(nproc: int, layout: str = "") -> int:
        return task(nproc, layout).global_batch

    assert [batch(nproc) for nproc in (2, 4, 8, 16, 32)] == [16, 16, 16, 32, 64]
    assert [batch(6), batch(12), batch(16, "tp=2"), batch(32, "tp=2,pp=4")] == [24, 24, 16, 16]
    for nproc in range(2, 33, 2):
        assert batch(nproc) % (2 * nproc) == 0
    assert task(8).overrides() == task(4).overrides(), "the losses of the default stay"
    assert "data.global_batch_size=32" in task(16).overrides()


@pytest.mark.nemo
def test_the_demo_knows_what_its_recipe_is_made_of() -> None:
    from checkpointless.recipes.checks import check, layout_of
    from checkpointless.recipes.settings import load

    recipe = load(demo.RECIPE)
    assert (recipe.model.config.num_layers, recipe.model.config.num_attention_heads) == (demo.LAYERS, demo.HEADS)
    assert (recipe.data.micro_batch_size, recipe.data.global_batch_size) == (demo.MICRO_BATCH, demo.GLOBAL_BATCH)
    for nproc, text in [(16, ""), (32, "pp=4"), (24, "tp=2"), (16, "ep=4"), (32, "pp=2,ep=4")]:
        task = Task(nproc, 3, TRAINERS["nemo"].layout(text), dropout=0.1)
        changed = load(demo.RECIPE, task.overrides())
        check(changed, layout_of(changed, 1, nproc))


def test_run_launches_what_was_asked(launched: list[LaunchConfig]) -> None:
    words = "--nproc-per-node 4 --cpu --record-steps --max-incidents 3"
    words += " --heartbeat-timeout 20 --regroup-timeout 30 --http-port 0 --http-host ::1"
    fault = "sigkill@backward:rank=3,step=5"
    argv = ["run", *words.split(), "--preload", "json,email.policy", "--run-dir", "here", "--fault", fault]
    assert main([*argv, "train.py", "--lr", "1", "--fault", "his own"]) == 7
    (config,) = launched
    assert (config.nproc_per_node, config.script, config.module) == (4, "train.py", False)
    assert config.script_args == ("--lr", "1", "--fault", "his own")
    assert (config.cpu, config.record_steps, config.max_incidents) == (True, True, 3)
    assert (config.http_port, config.http_host) == (0, "::1")
    assert (config.heartbeat_timeout_s, config.regroup_timeout_s) == (20.0, 30.0)
    assert (config.preload, config.run_dir.resolve()) == (("json", "email.policy"), Path("here").resolve())
    assert config.faults == (fault,)


def test_nothing_is_injected_or_recorded_unless_asked_for(launched: list[LaunchConfig]) -> None:
    assert main(["run", "train.py"]) == 7
    (config,) = launched
    assert (config.faults, config.record_steps, config.cpu) == ((), False, False)
    assert (config.http_port, config.max_incidents, config.node_timeout_s) == (None, None, 10.0)
    assert config.run_dir.parent.name == "runs"
    assert config.run_dir.name.endswith("-train")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("what", ["run train.py", pytest.param("train tiny_gpt_cpu", marks=pytest.mark.nemo)])
@pytest.mark.parametrize("happens", range(3))
def test_a_run_in_which_a_fault_did_not_happen_fails(
    what: str, happens: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = ["exception@data:rank=0,step=2", "slow@data:rank=0,step=3", "exit@data:prob=0.001"]

    def end_well(config: LaunchConfig, *_more: Any) -> int:
        assert config.run_dir is not None
        for index in range(happens):
            FaultLedger(config.run_dir).claim(index, parse(faults[index]))
        return 0

    monkeypatch.setattr(launch_module, "launch", end_well)
    command, program = what.split()
    asked = [word for fault in faults for word in ("--fault", fault)]
    assert main([command, "--cpu", *asked, program]) == (happens < 2)
    said = capsys.readouterr().err
    assert [f"{fault} did not happen" in said for fault in faults] == [happens < 1, happens < 2, False]


@pytest.mark.parametrize(
    ("command", "check"),
    [
        ("run train.py", ((), 30.0)),
        ("""run --device-check "sh -c 'exit 1'" train.py""", (("sh", "-c", "exit 1"), 30.0)),
        (f"{CHECK}=true {LIMIT}=7 run train.py", (("true",), 7.0)),
        (f"{CHECK}=false {LIMIT}=7 run --device-check true --device-check-timeout 9 train.py", (("true",), 9.0)),
        (f"{CHECK}=true run --device-check '' train.py", ((), 30.0)),
    ],
)
def test_an_option_wins_over_its_variable(
    launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch, command: str, check: object
) -> None:
    assert main(words_of(command, monkeypatch)) == 7
    assert (launched[0].check_command, launched[0].device_check_timeout_s) == check


def test_a_line_names_the_program_and_shows_what_cannot_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    say("two ranks\tof \x1b[2Jtrain\nin runs/1")
    assert capsys.readouterr() == ("", "checkpointless: two ranks\tof \\x1b[2Jtrain\n  in runs/1\n")


def test_a_dry_run_starts_nothing(launched: list[LaunchConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc-per-node", "4", "--dry-run", "train.py", "--steps", "5"]) == 0
    assert (capsys.readouterr().out, launched) == ("would start 4 ranks of train.py on this node\n", [])


def test_faults_lists_every_kind_and_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults"]) == 0
    shown = capsys.readouterr().out
    for word in (*(member.value for member in (*FaultKind, *FaultPhase)), *(kind.expected for kind in FaultKind)):
        assert word in shown


@pytest.mark.nemo
def test_train_launches_the_recipe_with_overrides_wherever_they_stand(launched: list[LaunchConfig]) -> None:
    argv = ["train", "tiny_gpt_cpu", "trainer.max_steps=3", "--nproc-per-node", "4", "--cpu", "data.seed=5"]
    assert main(argv) == 7
    (config,) = launched
    assert (config.script, config.module) == ("checkpointless.recipes.runner", True)
    assert config.script_args == ("tiny_gpt_cpu", "trainer.max_steps=3", "data.seed=5")
    assert "nemo.collections.llm" in (config.preload or ())


@pytest.fixture
def _nemo(capsys: pytest.CaptureFixture[str]) -> None:
    """Import NeMo uncaptured: its logger warns then, perhaps into what an earlier test had captured."""
    with capsys.disabled():
        importlib.import_module("nemo.collections.llm")


@pytest.mark.nemo
@pytest.mark.usefixtures("_nemo")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no_such_recipe"], "tiny_gpt_cpu"),
        (["tiny_gpt_cpu", "--cpu", "--nproc", "4"], "--nproc"),
        (["tiny_gpt_cpu", "--cpu", "trainer.max_steps=3", "--fault", "exit@data:rank=0,step=4"], "step 4 never"),
        (["tiny_gpt_cpu", "--cpu", "no_such_key=3"], "no_such_key"),
        (["tiny_gpt_cpu", "--cpu", "--nproc-per-node", "16"], "a global batch of 16 is not a multiple of 2 x 16"),
        (["tiny_gpt_cpu", "--nproc-per-node", "3", "data.global_batch_size=12"], "cannot hold 2 optimizer"),
        (["tiny_gpt_cpu", "strategy.num_distributed_optimizer_instances=3"], "cannot hold 3 optimizer"),
        (["tiny_gpt_cpu", "strategy.tensor_model_parallel_size=3"], "models of 3 ranks"),
        (["tiny_gpt_cpu", "trainer.max_steps=0"], "trainer.max_steps=0 trains nothing"),
        (["tiny_gpt_cpu", "callbacks={a.b: {_target_: builtins.object}}"], "callbacks: 'a.b' cannot be a name"),
        (["tiny_gpt_cpu", "callbacks={1: {_target_: builtins.object}}"], "callbacks: 1 cannot be a name"),
        (["tiny_gpt_cpu", "trainer.max_steps=-1"], "trainer.max_steps=-1 trains nothing"),
        (["tiny_gpt_cpu", "--fault", "sigkill:rank=4,step=1"], "rank 4 is not one of the 4"),
        (["tiny_gpt_cpu", "--cpu", "--fault", "node@forward:rank=3,step=2"], "--nnodes"),
        (["tiny_gpt_cpu", "checkpointless.memory_budget_bytes=0"], "at least 1"),
        (["tiny_gpt_cpu", "checkpointless.rng_replication_jump=-1"], "at least 0"),
        (["tiny_gpt_cpu", "checkpointless.tiers={neighbor_memory: {jump: 3}}"], "3 ranks apart"),
        (["tiny_gpt_cpu", "checkpointless.tiers={neighbor_memory: 3}"], "has to name tiers"),
        (["tiny_gpt_cpu", "checkpointless.tiers={nowhere: {}}"], "no tier is called nowhere"),
        (["tiny_gpt_cpu", "checkpointless.tiers=[1]"], "checkpointless.tiers must be a mapping"),
        (["tiny_lora_cpu", "checkpointless.tiers={neighbor_memory: {}}"], "leave tiers out"),
        (
            ["tiny_gpt_cpu", "strategy._target_=nemo.lightning.FSDPStrategy"],
            "knows nemo.lightning.MegatronStrategy",
        ),
        (["tiny_gpt_cpu", "optim.config.overlap_param_gather_with_optimizer_step=true"], "cannot be guarded"),
        (["tiny_gpt_cpu", "model.config.fp4=e2m1"], "set fp4=None"),
    ],
)
def test_train_refuses_before_anything_starts(argv: list[str], says: str, refused: Refused) -> None:
    assert says in refused(shlex.join(["train", *argv]))


@pytest.mark.parametrize(("phase", "explains"), [("data", True), ("between", False)])
def test_a_loop_of_ones_own_is_told_how_it_announces_a_phase(
    phase: str, explains: bool, launched: list[LaunchConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    fault = f"exit@{phase}:rank=0,step=2"
    assert main(["run", "--fault", fault, "train.py"]) == 7
    said = capsys.readouterr().err
    assert f"faults will be injected: {fault}" in said
    assert f"{fault} did not happen" in said
    assert (f"caller.enter_phase('{phase}', step)" in said) == explains


def test_ctrl_c_outside_of_a_job_is_one_line(
    launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_module, "launch", interrupted)  # before it listens to signals itself
    assert main(["run", "train.py"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "checkpointless: stopped by Ctrl-C"


def test_verify_says_whether_two_runs_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, losses in {"a": [2.0, 1.0], "b": [2.0, 1.0], "c": [2.0, 1.0 + 2**-52]}.items():
        log = StepLog(tmp_path / name, 0)
        for step, loss in enumerate(losses, start=1):
            log.record(step, loss, f"digest {loss}")
    differs = "not equal: loss of step 2 on rank 0 differs, by 2.22e-16"
    for name, status, said in (("b", 0, "equal: 2 steps on 1 ranks"), ("c", 1, differs)):
        assert main(["verify", str(tmp_path / "a"), str(tmp_path / name)]) == status
        assert said in capsys.readouterr().out
