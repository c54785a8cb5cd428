"""The GPUs and network ports of this machine: which there are, what is wrong with them, and which one a rank uses.

Everything is read from NVML and from files of the kernel, without torch and without a CUDA context.
"""
