"""Test what a node refuses to run, and what its configuration becomes."""

from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent.launch_config import LaunchConfig

TOKEN = "t" * 32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_check": "no-such-program -x"}, "'no-such-program -x' cannot be run: there is no such program"),
        ({"device_check": " "}, "there is no such program"),
        ({"device_check": "sh -c 'exit"}, "cannot be run: No closing quotation"),
        ({"device_check": "true", "regroup_timeout_s": 30.0}, "30 s must be less than --regroup-timeout, 30 s"),
        ({"script": "nowhere.py"}, "no script 'nowhere.py'"),
        ({"script": "nowhere.at.all", "module": True}, "no module 'nowhere.at.all'"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"nproc_per_node": 2, "script": __file__, "run_dir": tmp_path}
    LaunchConfig(**good)
    with pytest.raises(ValueError, match=said):
        LaunchConfig(**good | change)


@pytest.mark.parametrize(
    ("node", "own"), [(0, range(0, 2)), (1, range(2, 4)), (2, range(0))], ids=["first", "second", "spare"]
)
def test_a_node_runs_the_ranks_of_its_number_and_a_spare_runs_none(tmp_path: Path, node: int, own: range) -> None:
    config = LaunchConfig(
        nproc_per_node=2,
        script=__file__,
        run_dir=tmp_path,
        nnodes=2,
        spares=1,
        node_rank=node,
        rdzv_endpoint="here",
        token=TOKEN,
    )
    assert config.own_ranks == own
