"""Provide a kernel that occupies the GPU until a flag in host memory is set, or until its own time is over.

It is given to the driver as PTX, so that no compiler is needed. See the PTX ISA for ``ld.relaxed.sys`` (6.0 and
later) and ``%globaltimer``, which counts nanoseconds.
"""

from __future__ import annotations

import ctypes
import time

import torch

_PTX = b"""
.version 6.4
.target sm_70
.address_size 64

.visible .entry spin_until(.param .u64 where, .param .u64 most)
{
    .reg .pred %p<3>;
    .reg .b32 %r<2>;
    .reg .b64 %d<6>;
    ld.param.u64 %d1, [where];
    ld.param.u64 %d2, [most];
    mov.u64 %d3, %globaltimer;
again:
    ld.relaxed.sys.u32 %r1, [%d1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra over;
    mov.u64 %d4, %globaltimer;
    sub.u64 %d5, %d4, %d3;
    setp.lt.u64 %p2, %d5, %d2;
    @%p2 bra again;
over:
    ret;
}
\0"""
_STARTED_S = 0.05


class Spin:
    """Occupies a stream of the current GPU on demand.

    The driver is called through ``ctypes``: :attr:`driver` releases the interpreter lock during a call, and
    :attr:`holding_driver` does not.
    """

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32).pin_memory()  # the device knows it by the same address
        torch.zeros(1, device="cuda").add_(1)  # the context of this thread, and a kernel that is loaded
        torch.cuda.synchronize()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.holding_driver = ctypes.PyDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._check(self.driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(_PTX)))
        self._check(self.driver.cuModuleGetFunction(ctypes.byref(self._function), module, b"spin_until"))
        self.start(0.001)  # loaded lazily, it could not be loaded behind itself
        torch.cuda.synchronize()
        self.release()

    def start(self, most_s: float, stream: torch.cuda.Stream | None = None) -> None:
        """Launch the kernel, which ends at :meth:`release` or after ``most_s`` seconds."""
        self._flag[0] = 0
        self.launch(most_s, stream=stream)
        time.sleep(_STARTED_S)

    def launch(self, most_s: float, holding: bool = False, stream: torch.cuda.Stream | None = None) -> None:
        """Launch the kernel once more with the flag as it is; ``holding`` keeps the interpreter lock meanwhile."""
        where, most = ctypes.c_uint64(self._flag.data_ptr()), ctypes.c_uint64(int(most_s * 1e9))
        given = (ctypes.c_void_p * 2)(ctypes.addressof(where), ctypes.addressof(most))
        handle = ctypes.c_void_p((stream or torch.cuda.current_stream()).cuda_stream)
        driver = self.holding_driver if holding else self.driver
        one = (1,) * 6
        self._check(driver.cuLaunchKernel(self._function, *one, 0, handle, given, None))

    def release(self) -> None:
        self._flag[0] = 1

    def _check(self, status: int) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self.driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"the driver answered {status}: {(text.value or b'unknown error').decode()}")
