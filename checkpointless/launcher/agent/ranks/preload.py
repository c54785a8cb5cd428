"""Finds the modules that are worth importing once, before the ranks are forked, and imports them."""

from __future__ import annotations

import ast
import importlib.util
import logging
import pkgutil
import site
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from checkpointless.launcher.agent.ranks.rank_process import Script

logger = logging.getLogger(__name__)

_OWN_PACKAGE = "checkpointless"
#: What the first optimizer of a process imports, and its first fault: time that all ranks would wait for.
_WITH_TORCH = ("torch._dynamo", "torch.distributed.tensor.debug")


def preloads_of(script: Script) -> tuple[str, ...]:
    """Return the sorted names that ``script`` imports, anywhere in the file, from installed distributions.

    The user's own modules belong to the run of the script. ``from a.b import c`` gives ``a.b.c``, module or not. A
    source that cannot be read gives nothing: running it will say why.
    """
    source = _source(script)
    if source is None:
        return ()
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        logger.info("nothing is preloaded for %s: %s", source, error)
        return ()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(node.module if a.name == "*" else f"{node.module}.{a.name}" for a in node.names)
    return installed(names, Path.cwd() if script.module else source.parent)


def installed(names: Iterable[str], local: Path) -> tuple[str, ...]:
    """Return, sorted, those of ``names`` that come from no module in ``local``, and what torch needs."""
    wanted = set(names)
    roots = {root for root in {name.partition(".")[0] for name in wanted} if _is_installed(root, local)}
    if "torch" in roots:
        wanted.update(_WITH_TORCH)
    return tuple(sorted(name for name in wanted if name.partition(".")[0] in roots))


def preload(names: tuple[str, ...], script: Script | None = None) -> dict[str, str]:
    """Import ``names``; return those that fail, which are left to the script, each with a line that is logged."""
    failed = {}
    beside = [] if script is None or script.module else [str(Path(script.target).resolve().parent)]
    sys.path[:0] = beside
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except Exception as error:  # noqa: BLE001 - importing runs other people's code
            failed[name] = f"preloading {name} failed: {type(error).__name__}"
            with suppress(Exception):  # its __str__ is other people's code, too
                failed[name] += f": {error}"
            logger.warning(failed[name])
    for folder in beside:
        sys.path.remove(folder)
    return failed


def prepare(script: Script) -> None:
    """Call a preloaded module's ``before_ranks`` with the script's arguments: what each rank would do first."""
    module = sys.modules.get(script.target) if script.module else None
    before_ranks = getattr(module, "before_ranks", None)
    if before_ranks is None:
        return
    try:
        before_ranks(script.args)
    except Exception as error:  # noqa: BLE001 - other people's code, which the ranks run all the same
        logger.warning("preparing %s failed: %s: %s", script.target, type(error).__name__, error)


def _source(script: Script) -> Path | None:
    if not script.module:
        return Path(script.target).resolve()
    parent, _, _ = script.target.rpartition(".")
    path = [str(Path.cwd()), *sys.path]
    try:
        if parent:
            spec = importlib.util.find_spec(script.target)
        else:
            spec = PathFinder.find_spec(script.target, path)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))) / "__main__.py"
    return Path(spec.origin) if spec.origin else None


def _is_installed(root: str, local: Path) -> bool:
    if root == _OWN_PACKAGE:
        return True
    if root in sys.stdlib_module_names:
        return False
    spec = PathFinder.find_spec(root, [str(local), *sys.path])
    return spec is not None and any(_in_site_packages(place) for place in _places(spec))


def _places(spec: ModuleSpec) -> list[str]:
    if spec.submodule_search_locations:
        return list(spec.submodule_search_locations)
    return [spec.origin] if spec.origin else []


def _in_site_packages(place: str) -> bool:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    return any(Path(place).is_relative_to(path) for path in {*paths, *site.getsitepackages()} if path)


_CPU_PLATFORM = "checkpointless.integrations.megatron.cpu_platform:install"  # the launcher knows no framework


class PlatformError(RuntimeError):
    """The CPU platform cannot be used; the message says why, in one line."""


def install_cpu_platform() -> None:
    """Have Megatron-core and NeMo train on CPUs in this process; :class:`PlatformError` if they cannot."""
    try:
        pkgutil.resolve_name(_CPU_PLATFORM)()
    except Exception as error:  # CUDA is there, or a framework is not as it should be
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise PlatformError(f"the CPU platform cannot be used: {why}") from error
