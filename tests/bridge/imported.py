"""Import Megatron-Bridge, which takes the CPU platform where TransformerEngine is not installed."""

from checkpointless.integrations.megatron import cpu_platform

cpu_platform.install()
import checkpointless.integrations.megatron_bridge  # noqa: E402, F401

cpu_platform.uninstall()
