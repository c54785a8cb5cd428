"""Read the scripts of ``examples/`` and the diffs that make them come through faults."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FULL = ["train_ddp_full", "train_fsdp2_full"]  # scripts of a real job's size
TRAINER = "train_hf"  # in tests/hf, where transformers 5 is
WITH_DIFF = sorted({path.stem for path in EXAMPLES.glob("*.diff")} - {*FULL, TRAINER})
# Two replicas of two shards, or what the script itself says.
FOUR_RANKS = frozenset(
    {"train_fsdp2_full", "train_hsdp", "train_lightning_hsdp", "train_megatron", "train_lightning"}
)


def ranks_of(name: str) -> int:
    return 4 if name in FOUR_RANKS else 2


def changed_lines(diff: str, sign: str) -> list[str]:
    return [line[1:] for line in diff.splitlines() if line.startswith(sign) and not line.startswith(sign * 3)]


def stock_script(name: str, folder: Path) -> Path:
    """Write an example without the lines of its diff, which knows nothing of recovery."""
    plain = folder / f"{name}.py"
    plain.write_bytes((EXAMPLES / plain.name).read_bytes())
    back = ["git", "apply", "-R", "--unidiff-zero", "-"]
    diff = (EXAMPLES / f"{name}.diff").read_text()
    subprocess.run(back, cwd=folder, input=diff, text=True, check=True)
    code = plain.read_text().partition("import argparse")[2].lower()
    assert code
    assert "checkpointless" not in code
    assert "wrapper" not in code
    return plain
