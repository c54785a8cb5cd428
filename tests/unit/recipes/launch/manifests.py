"""Read what the files in recipes/launch say, for tests of them."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[4]
LAUNCH = ROOT / "recipes" / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
POD_FILES = ("jobset.yaml", "trainingruntime.yaml")


def loaded(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def set_of(name: str) -> dict[str, Any]:
    """Return what the file says of the JobSet."""
    spec = loaded(name)["spec"]
    return spec if "replicatedJobs" in spec else spec["template"]["spec"]  # type: ignore[no-any-return]


def job_of(name: str, job: str = "node") -> dict[str, Any]:
    """Return one of the two Jobs that the file has JobSet make."""
    (replicated,) = (each for each in set_of(name)["replicatedJobs"] if each["name"] == job)
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]  # type: ignore[no-any-return]


def container_of(name: str, job: str = "node") -> dict[str, Any]:
    (container,) = job_of(name, job)["template"]["spec"]["containers"]
    assert container["name"] == job
    return container  # type: ignore[no-any-return]


def script_of(name: str, job: str = "node") -> str:
    """Return the shell script of a pod."""
    container = container_of(name, job)
    words = [*container["command"], *container.get("args", [])]
    assert words[:2] == ["bash", "-c"]
    return str(words[2])


def env_of(name: str, job: str = "node") -> dict[str, Any]:
    return {each["name"]: each for each in container_of(name, job)["env"]}
