"""Run the scripts and commands that the documentation describes, scripts through faults."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.nemo_zygote import ROOT, Zygote
from tests.unit.project.test_readme import DOCUMENTS, commands_of

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(900)]

SCRIPTS = [
    # The script of HyperPod's documentation, with its imports changed as docs/coming-from-hyperpod.md says.
    (4, ["exception@backward:rank=1,step=3", "sigkill@forward:rank=2,step=4"], "hyperpod_documented")
]

# Commands that match one of these patterns are parsed only (tests/unit/project/test_readme.py).
NOT_RUN = {
    r" --nnodes ": "several nodes; tests/ranks/test_nodes.py runs such jobs",
    r" run (?!.*--cpu).*train\.py": "a script of the reader's, on GPUs",
    r" --cpu .* train\.py$": "a script of the reader's; the page's own script is run above",
    r" demo( |$)": "two jobs or many, and an import of NeMo; tests/ranks/test_recovery.py has such jobs",
    r" doctor": "its status depends on the machine; tests/unit/cli/commands/test_doctor.py has the command",
    r" report runs/1 runs/2": "the runs of a job that was started twice",
    r" report /": "the run directory of a job on a cluster",
    r" tiny_gpt_cpu --cpu --nproc-per-node 4( trainer\.max_steps=20)?$": "is run with --record-steps",
    r" --nproc-per-node 4 examples/train_gpt\.py --steps 20$": "is run with --record-steps",
    r"train_bridge\.py": "Bridge, which another environment has; tests/bridge/test_saves.py runs it",
    r"train_hf\.py": "transformers 5, which NeMo does not want; tests/hf/test_example.py runs it",
    r"train_torchtitan\.py": "torchtitan, which another environment has; tests/titan runs it",
    r" llama3\w+ --dry-run$": "half a minute; tests/ranks/test_recipes.py compares its output",
    r" rehearse ": "six jobs; tests/ranks/test_rehearse.py has such",
}
# What trains for as long as its recipe or script says needs fewer steps here; faults come by the seventh.
FEWER_STEPS = {r" train (?!.*max_steps)": " trainer.max_steps=8", r"examples/train_gpt\.py$": " --steps 8"}
# Their commands run in a folder of their own, because they name the same run directories.
ALONE = {"your-own-job.md"}
WORKPLACES = {
    "quickstart": [document for document in DOCUMENTS if document.name in ("quickstart.md", "report.md")],
    "all": [document for document in DOCUMENTS if document.name not in ALONE],
    **{name: [document for document in DOCUMENTS if document.name == name] for name in sorted(ALONE)},
}


def execute(zygote: Zygote, folder: Path, command: str, limit_s: float = 180.0) -> tuple[int, str]:
    command += "".join(fewer for pattern, fewer in FEWER_STEPS.items() if re.search(pattern, command))
    argv = shlex.split(command)[1:]
    (answer,) = zygote.run(
        1, "tests.ranks.docs_commands:command_here", {"argv": argv, "folder": str(folder)}, limit_s=limit_s
    )
    return answer["code"], answer["out"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.mark.parametrize(("ranks", "faults", "name"), SCRIPTS)
def test_a_script_comes_through_its_faults(
    nemo_zygote: Zygote, folder: Path, ranks: int, faults: list[str], name: str
) -> None:
    script = (Path(__file__).parent / "agent_scripts" / f"{name}.py").read_text()
    shutil.copy(folder / "examples" / "train_gpt.py", folder)  # some scripts import from it
    (folder / "train.py").write_text(script)
    start = f"checkpointless run --cpu --nproc-per-node {ranks} --record-steps"
    asked = " ".join(f"--fault {fault}" for fault in faults)
    code, said = execute(nemo_zygote, folder, f"{start} --run-dir runs/rough {asked} train.py")
    assert code == 0, said + _logs(folder)
    assert fired(folder / "runs" / "rough") == dict.fromkeys(faults, 1)
    code, said = execute(nemo_zygote, folder, f"{start} --run-dir runs/calm train.py")
    assert code == 0, said
    verdict = compare(read_steps(folder / "runs" / "calm"), read_steps(folder / "runs" / "rough"))
    assert verdict.equal, verdict.sentence
    assert verdict.steps >= 6


@pytest.mark.parametrize(
    "workplace", ["quickstart", *(pytest.param(each, marks=pytest.mark.long) for each in ("all", *sorted(ALONE)))]
)
def test_the_commands_do_what_they_say(nemo_zygote: Zygote, folder: Path, workplace: str) -> None:
    done: dict[str, Any] = {}
    for document in WORKPLACES[workplace]:
        for command in commands_of(document):
            if command not in done and not any(re.search(pattern, command) for pattern in NOT_RUN):
                code, said = execute(nemo_zygote, folder, command)
                assert code == 0, f"{document.name}: {command}\n{said}{_logs(folder)}"
                done[command] = said
    compared = [said for command, said in done.items() if " verify " in command]
    assert compared
    for said in compared:
        assert re.search(r"^equal: \d+ steps on \d+ ranks, bit by bit$", said, re.M), said


def test_only_what_is_there_is_left_out() -> None:
    commands = [command for document in DOCUMENTS for command in commands_of(document)]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in commands), pattern


# Names of HyperPod and NVRx that the two pages need not list, since they do the same here.
WITHOUT_DIFFERENCE = """
    HPWrapper(enabled=) HPWrapper(async_raise_before_abort=) HPCallWrapper.start_hp_fault_handling_thread
    HPAgentK8sAPIFactory HPCallWrapper.restart HPCallWrapper.launch CheckpointManager.store_rng_states
    HPWrapper(check_memory_status=) PEFTCheckpointManager.base_model_weights CheckpointlessFinalizeCleanup.trainer
    LocalCheckpointError CliqueReplicationStrategy.replicate LazyCliqueReplicationStrategy(replication_jump=)
    LazyCliqueReplicationStrategy(replication_factor=) HPCallWrapper.shutdown CudaHealthCheck(timeout=)
    CheckpointlessAbortManager.get_default_checkpointless_abort CheckpointlessAbortManager.create_custom_abort
    HPCheckpointingAbort CheckpointlessFinalizeCleanup.register_attributes CheckpointManager.global_step
    CheckpointManager.checksum_manager CheckpointManager.parameter_update_lock CheckpointManager.load_rng_states
    MemoryChecksumManager CheckpointManager.maybe_offload_checkpoint
    PEFTCheckpointManager.base_model_keys_to_extract PEFTCheckpointManager.maybe_save_base_model
    PEFTCheckpointManager.save_checkpoint PEFTCheckpointManager.try_checkpointless_load
    PEFTCheckpointManager.is_adapter_key PEFTCheckpointManager.maybe_offload_checkpoint
    CheckpointlessMegatronStrategy.base_store CheckpointlessMegatronStrategy.load_model_state_dict
    CheckpointlessMegatronStrategy.is_peft CheckpointlessMegatronStrategy.teardown
    CheckpointlessCallback(clean_lightning_module=) CheckpointlessCallback.tried_adapter_checkpointless
    CheckpointlessCallback.on_train_batch_start CheckpointlessCallback.get_peft_callback
    CheckpointlessCallback._try_adapter_checkpointless_restore CheckpointlessCompatibleConnector.resume_end Abort
    Finalize HealthCheck AbortTransformerEngine CudaHealthCheck HealthCheckError InternalError RankShouldRestart
    LocalCheckpointManager(session_id=) LocalCheckpointManager(repl_strategy=)
    CliqueReplicationStrategy(local_group=) CliqueReplicationStrategy(target_device=)
    CliqueReplicationStrategy.retrieve_plan ReplicationStrategy NoReplicasAvailableError
    CheckpointManager.checkpointless_recovery_feasible HPCallWrapper.initialize_barrier
    HPCallWrapper.handle_fn_exception LocalCheckpointManager.find_latest
"""


@pytest.mark.parametrize("page", ["coming-from-hyperpod.md", "coming-from-nvrx.md"])
def test_every_name_of_ours_exists(nemo_zygote: Zygote, page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    ours = re.findall(r"^\|[^|\n]*\|([^|\n]*)\|[^|\n]*\|$", text, re.M)  # theirs, ours, what is different
    for rows in re.findall(r"^\| name \| difference \|\n((?:\|.*\n)+)", text, re.M):
        ours += re.findall(r"^\|([^|\n]*)\|", rows, re.M)
    names = sorted({name for cell in ours for name in re.findall(r"`([^`]+)`", cell)})
    names += WITHOUT_DIFFERENCE.split()
    assert len(names) > 25
    (unknown,) = nemo_zygote.run(1, "tests.ranks.docs_commands:unknown_names", {"names": names})
    assert unknown == []
    made_up = ["HPWrapper(aborts=)", "HPWrapper.nothing", "Nothing"]
    (unknown,) = nemo_zygote.run(1, "tests.ranks.docs_commands:unknown_names", {"names": made_up})
    assert unknown == made_up


def _logs(folder: Path) -> str:
    """Return the end of what each rank of the newest run has printed."""
    runs = sorted(folder.glob("runs/*"), key=lambda run_dir: run_dir.stat().st_mtime)
    logs = sorted((runs[-1] / "logs").glob("rank-*")) if runs else []
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in logs)
