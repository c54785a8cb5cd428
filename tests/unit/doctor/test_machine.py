"""Test the checks that ask the kernel of this machine: variables, folders, limits, features, network."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointless.doctor import kernel, limits, network, storage, variables
from checkpointless.doctor.findings import Finding, Severity
from checkpointless.doctor.limits import Limits
from checkpointless.doctor.network import Endpoint, Network
from checkpointless.doctor.storage import LEAST_SHARED_BYTES, Folder
from checkpointless.nccl import SETTINGS
from checkpointless.posix.temp_folder import LONGEST_TMPDIR

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GB = 10**9
WELL = Limits(65536, 65536, 100_000, None, has_rdma=True, has_gpu=True)
MEETS = Network("node0", "", "10.0.0.1", "")


def worst(findings: list[Finding]) -> Finding:
    order = list(Severity)
    return min(findings, key=lambda each: order.index(each.severity))


def of(name: str, environ: dict[str, str]) -> Finding:
    (found,) = [each for each in variables.judge(environ) if each.seen.startswith(f"{name}=")]
    return found


def test_without_variables_the_defaults_are_in_force() -> None:
    found = variables.judge({"PATH": "/bin", "NCCL": "x"})
    assert {each.severity for each in found} == {Severity.OK}
    assert [each.seen for each in found] == [f"{name}={setting.value}" for name, setting in SETTINGS.items()]
    assert {each.source for each in found} == {"the default that checkpointless sets"}


@pytest.mark.parametrize(("name", "value"), [(name, "3") for name in SETTINGS] + [("NCCL_NVLS_ENABLE", "1")])
def test_a_harmful_value_is_named_with_what_it_costs(name: str, value: str) -> None:
    found = of(name, {name: value})
    assert found.severity is Severity.WARNING
    assert found.seen == f"{name}={value}: {SETTINGS[name].otherwise}"
    assert (found.source, found.todo) == ("this environment", f"unset {name}")
    assert of(name, {name: SETTINGS[name].value}).severity is Severity.OK


def test_what_torchrun_sets_is_no_users_wish() -> None:
    found = of(HANDLING, {HANDLING: "1", "TORCHELASTIC_RUN_ID": "job"})
    assert (found.severity, found.seen) == (Severity.OK, f"{HANDLING}=0")
    assert "torchrun" in found.source
    assert of(HANDLING, {HANDLING: "1"}).severity is Severity.WARNING


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", Severity.WARNING),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", Severity.OK),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", Severity.WARNING),
        ("NCCL_BLOCKING_WAIT", "1", Severity.WARNING),  # torch reads the old name where there is no new one
        ("NCCL_ASYNC_ERROR_HANDLING", "3", Severity.ADVICE),  # overruled by the new one, which is always set
        ("NCCL_DEBUG", "INFO", Severity.OK),
    ],
)
def test_other_variables(name: str, value: str, severity: Severity) -> None:
    assert of(name, {name: value}).severity is severity
    assert variables.facts({name: value, "HOME": "/"}) == {name: value}


@pytest.mark.parametrize(
    ("folder", "severity"),
    [
        (Folder("/dev/shm", 25 * GB, 25 * GB), Severity.OK),
        (Folder("/dev/shm", LEAST_SHARED_BYTES, LEAST_SHARED_BYTES), Severity.OK),
        (Folder("/dev/shm", 64 * 2**20, 64 * 2**20), Severity.WARNING),
        (Folder("/dev/shm", 25 * GB, GB // 2), Severity.WARNING),
        (Folder("/dev/shm", error="Permission denied"), Severity.ERROR),
    ],
)
def test_shared_memory(folder: Folder, severity: Severity) -> None:
    (found,) = storage.judge_shared_memory(folder)
    assert found.severity is severity
    assert bool(found.todo) is (severity is not Severity.OK)


def test_a_small_file_system_is_measured(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    code = f"from checkpointless.doctor.storage import *; print(shared_memory(Path({str(tmp_path)!r}))[0].seen)"
    command = f"mount -t tmpfs -o size=32m none {tmp_path} && exec {sys.executable} -c {code!r}"
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    done = subprocess.run([unshare, "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert "has 33.6 MB, 33.6 MB of it free: NCCL and data-loader workers die" in done.stdout, done.stderr


def test_temporary_files(tmp_path: Path) -> None:
    (fine,) = storage.judge_temporary_files(Folder("/tmp", 9 * GB, 9 * GB), "TMPDIR")
    assert fine.severity is Severity.OK
    deep = tmp_path / ("x" * LONGEST_TMPDIR)
    deep.mkdir()
    (long,) = storage.temporary_files(str(deep))
    assert (long.severity, long.source) == (Severity.WARNING, "TMPDIR")
    assert f"{len(str(deep))} bytes" in long.seen
    (missing,) = storage.temporary_files("/nowhere")
    assert (missing.severity, missing.todo) == (
        Severity.WARNING,
        "create /nowhere, or set TMPDIR to a folder that can be written",
    )
    (nowhere,) = storage.judge_temporary_files(Folder("/tmp", error="Read-only file system"), "the default")
    assert nowhere.severity is Severity.ERROR
    (full,) = storage.judge_temporary_files(Folder("/tmp", 9 * GB, 10**6), "TMPDIR")
    assert full.severity is Severity.WARNING


def test_a_run_directory_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    (found,) = storage.run_directory(tmp_path / "not" / "yet")
    assert "the run directory's disk takes" in found.seen
    assert list(tmp_path.iterdir()) == []
    (slow,) = storage.judge_run_directory(Folder("d", GB, GB, 2.5))
    assert (slow.severity, "2.50 s" in slow.seen) == (Severity.ADVICE, True)
    (refused,) = storage.judge_run_directory(Folder("d", error="Read-only file system"))
    assert refused.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("changed", "severity", "todo"),
    [
        ({}, Severity.OK, ""),
        ({"files": None}, Severity.OK, ""),
        ({"files": 100}, Severity.ERROR, "ulimit -n 65536 "),
        ({"files": 512, "files_hard": 4096}, Severity.WARNING, "ulimit -n 4096 "),
        ({"files": 512, "files_hard": None}, Severity.WARNING, "ulimit -n 65536 "),
        ({"files": 512, "files_hard": 512}, Severity.WARNING, "limits.conf"),
        ({"files": 1024, "files_hard": 2048}, Severity.ADVICE, "ulimit -n 2048 "),
        ({"files": 1024, "has_gpu": False}, Severity.OK, ""),
        ({"processes": 500}, Severity.WARNING, "ulimit -u"),
        ({"processes": None}, Severity.OK, ""),
        ({"locked_bytes": 65536}, Severity.WARNING, "memlock"),
        ({"locked_bytes": 65536, "has_rdma": False}, Severity.ADVICE, "memlock"),
        ({"locked_bytes": 65536, "has_rdma": False, "has_gpu": False}, Severity.OK, ""),
    ],
)
def test_limits(changed: dict[str, int | None], severity: Severity, todo: str) -> None:
    found = worst(limits.judge(replace(WELL, **changed), 8))  # type: ignore[arg-type]
    assert found.severity is severity
    assert todo in found.todo


def test_limits_are_those_of_the_shell(tmp_path: Path) -> None:
    code = "from checkpointless.doctor.limits import *; print(judge(read(False), 4)[0].seen)"
    command = f"ulimit -n 200 && exec {sys.executable} -c {code!r}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("200 open files for each process: connections"), done.stderr
    assert limits.read(True).files in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)


def test_the_control_groups_processes_count(tmp_path: Path) -> None:
    (tmp_path / "pids.max").write_text("400\n")
    (tmp_path / "pids.current").write_text("150\n")
    assert limits.read(False, tmp_path, tmp_path / "none").processes == 250
    (tmp_path / "pids.max").write_text("max\n")
    assert limits.read(False, tmp_path, tmp_path / "none").processes != 250


def test_this_kernel_has_what_is_used() -> None:
    (found,) = kernel.judge(kernel.read())
    assert (found.severity, found.seen) == (Severity.OK, "memfd, PR_SET_PDEATHSIG, SOCK_SEQPACKET, pidfd work")


def test_a_feature_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.delattr(os, "pidfd_open")
    memfd, pidfd = kernel.judge(kernel.read())
    assert (memfd.severity, pidfd.severity) == (Severity.ERROR, Severity.ADVICE)
    assert "memfd does not work ([Errno 1] Operation not permitted): a rank has no board" in memfd.seen


def test_a_port_of_this_machine_is_bound_and_reached() -> None:
    found = network.judge(network.read(None, 1), 1)
    assert found[0].seen == "ports of 127.0.0.1 can be bound and reached"
    assert not any(each.is_to_change for each in found)


def test_endpoints_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert network.read(("127.0.0.1", port), 2).endpoint == Endpoint(f"127.0.0.1:{port}")
    nobody = network.read(("127.0.0.1", port), 2).endpoint
    assert nobody is not None
    assert nobody.is_refused
    unknown = network.read(("no-such-host.invalid", 1), 2)
    assert unknown.endpoint is not None
    assert unknown.endpoint.name_error
    assert worst(network.judge(unknown, 2)).severity is Severity.ERROR


@pytest.mark.parametrize(
    ("seen", "nodes", "severity"),
    [
        (MEETS, 1, Severity.OK),
        (MEETS, 2, Severity.ADVICE),  # the endpoint is not known
        (replace(MEETS, endpoint=Endpoint("n:1")), 2, Severity.OK),
        (replace(MEETS, endpoint=Endpoint("n:1", connect_error="refused", is_refused=True)), 2, Severity.OK),
        (replace(MEETS, endpoint=Endpoint("n:1", connect_error="timed out")), 2, Severity.ERROR),
        (replace(MEETS, endpoint=Endpoint("n:1"), host_error="unknown"), 2, Severity.WARNING),
        (replace(MEETS, host_error="unknown"), 1, Severity.ADVICE),
        (replace(MEETS, address_error="refused"), 1, Severity.ERROR),
    ],
)
def test_what_the_network_means(seen: Network, nodes: int, severity: Severity) -> None:
    assert worst(network.judge(seen, nodes)).severity is severity
