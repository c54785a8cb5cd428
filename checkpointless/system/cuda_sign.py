"""Whether CUDA was initialised in this process, by torch or by anybody else."""

from __future__ import annotations

import ctypes
import os
import sys

TORCH_SIGN = "torch.cuda.is_initialized()"  # what torch knows, it says to forked children
_INIT_SIGN = "cuInit"  # the driver has been asked for devices, and none of their memory is taken
_LIBCUDA = "libcuda.so.1"
_CUDA_SUCCESS, _CUDA_NOT_INITIALIZED = 0, 3  # of CUresult


def cuda_sign() -> str:
    """Return how it shows that CUDA was initialised in this process; "" if it does not."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and getattr(cuda, "_initialized", False):
        return TORCH_SIGN
    try:
        driver = ctypes.CDLL(_LIBCUDA, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # only if somebody has loaded it
    except OSError:
        return ""
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == _CUDA_NOT_INITIALIZED:
        return ""
    return "a context of the CUDA driver" if context.value or _has_primary_context(driver) else _INIT_SIGN


def _has_primary_context(driver: ctypes.CDLL) -> bool:
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return False
    for device in range(count.value):
        code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if code == _CUDA_SUCCESS and active.value:
            return True
    return False
