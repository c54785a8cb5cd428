"""Test what is said of imports that stand in the way of a fork, with real processes that import them."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from checkpointless.doctor.findings import Finding, Severity
from checkpointless.doctor.forking import _Trial, judge, read
from checkpointless.launcher.agent.ranks.rank_process import Script

pytestmark = pytest.mark.slow

# The functions of CUDA's driver that are asked, and the one that initialises it.
LIBCUDA = """
static int initialised = 0;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = 0; return initialised ? 0 : 3; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = device == PRIMARY; return 0; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path


def tried(folder: Path, *names: str, timeout_s: float = 200.0) -> _Trial:
    script = Script(str(folder / "train.py"))
    return read(names, script, ranks=2, cpu=False, timeout_s=timeout_s)


def fake_driver(folder: Path, primary: int) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(LIBCUDA)
    command = [compiler, "-shared", "-fPIC", f"-DPRIMARY={primary}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=60)
    return library


def worst(trial: _Trial) -> Finding:
    return judge(trial)[0]


def test_a_script_whose_name_is_not_utf8_is_read(folder: Path) -> None:
    script = folder / "caf\udce9.py"
    script.write_text("")
    trial = read(("xml.dom",), Script(str(script)), ranks=2, cpu=False)
    assert (trial.names, trial.error) == (("xml.dom",), "")


def test_harmless_imports_can_be_forked(folder: Path) -> None:
    (folder / "harmless.py").write_text("import json\n")
    trial = tried(folder, "harmless", "xml.dom")
    assert (trial.names, trial.cuda, trial.can_fork, trial.threads, trial.failed) == (
        ("harmless", "xml.dom"),
        *("", True, (), ()),
    )
    (found,) = judge(trial)
    assert found.severity is Severity.OK
    assert found.seen.startswith("2 names imported in ")


def test_what_torch_initialised_is_put_down_to_the_import_that_did(folder: Path) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("from torch import cuda\n")
    (folder / "torch" / "cuda.py").write_text("_initialized = False\ndef _is_in_bad_fork(): return _initialized\n")
    (folder / "outer.py").write_text("import torch\nimport inner\nimport json.tool\n")
    (folder / "inner.py").write_text("import torch.cuda\ntorch.cuda._initialized = True\nimport wave\n")
    trial = tried(folder, "outer")
    assert (trial.cuda, trial.can_fork, trial.cuda_by) == ("torch.cuda.is_initialized()", False, "outer")
    found = worst(trial)
    assert found.severity is Severity.WARNING
    assert "importing outer initialised CUDA" in found.seen
    assert "each replaced rank imports everything again" in found.seen


@pytest.mark.parametrize(("primary", "how"), [(-1, "cuInit"), (1, "a context of the CUDA driver")])
def test_a_driver_that_torch_does_not_know_of_is_an_error(folder: Path, primary: int, how: str) -> None:
    library = fake_driver(folder, primary)
    load = f"import ctypes\ndriver = ctypes.CDLL({str(library)!r})\n"
    (folder / "loads.py").write_text(load)
    (folder / "starts.py").write_text(f"{load}driver.cuInit(0)\n")
    assert tried(folder, "loads").cuda == ""
    trial = tried(folder, "loads", "starts")
    assert (trial.cuda, trial.cuda_by) == (how, "starts")
    found = worst(trial)
    assert found.severity is Severity.ERROR
    assert "which torch does not know: forked ranks fail" in found.seen


def test_a_thread_that_goes_on_is_named(folder: Path) -> None:
    thread = "threading.Thread(target=time.sleep, args=({},), name={!r}, daemon=True)"
    going, ending = thread.format(60, "uploader"), thread.format(0, "brief")
    source = f"import threading, time\n{going}.start()\nt = {ending}\nt.start(); t.join()\n"
    (folder / "uploads.py").write_text(source)
    trial = tried(folder, "uploads")
    assert trial.threads == (("uploader", "uploads"),)
    found = worst(trial)
    assert found.severity is Severity.WARNING
    assert found.seen.startswith("importing uploads started the thread uploader")


def test_an_import_that_does_not_end_is_killed_in_time(folder: Path) -> None:
    (folder / "hangs.py").write_text("import time\ntime.sleep(100)\n")
    began_s = time.monotonic()
    found = worst(tried(folder, "hangs", timeout_s=8.0))
    assert time.monotonic() - began_s < 60
    assert found.seen == "the process that imports did not end within 8 s at hangs (1 of 1)"


def test_an_import_that_ends_the_process_is_not_put_down_to_one_that_failed_before(folder: Path) -> None:
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    found = worst(tried(folder, "nowhere_to_be_found", "ends"))
    assert found.seen == "the process that imports ended with code 3 at ends (2 of 2)"
