"""Find the packages: ``callbacks/``, ``recipes/`` and ``strategies/`` are installed below ``checkpointless``."""

from setuptools import find_namespace_packages, setup

OURS = "checkpointless"
INSIDE = ("callbacks", "recipes", "strategies")


def found(folder: str) -> list[str]:
    """Return the packages below ``folder``, folders that hold nothing but data among them."""
    return find_namespace_packages(include=[folder, f"{folder}.*"], exclude=["*__pycache__*"])


setup(
    packages=[*found(OURS), *(f"{OURS}.{name}" for folder in INSIDE for name in found(folder))],
    package_dir={f"{OURS}.{folder}": folder for folder in INSIDE},
    package_data={"": ["*"]},  # every file of theirs
)
