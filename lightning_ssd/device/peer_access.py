"""Device memory of other processes of the host, by the driver's calls for inter-process communication (CUDA IPC).

A process exports memory by a handle, which others open. Copies from the address that they get cross NVLink or PCIe,
without host memory. The memory stays mapped in a process until it closes it or ends.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


def export_memory(memory: Tensor) -> tuple[bytes, int]:
    """Returns a handle of memory on a CUDA device, and the offset in bytes at which it begins in that of the handle.

    What the current stream has written is in the memory then.

    Raises:
        RuntimeError: it can't be exported, such as memory of an expandable segment of torch's allocator.
    """
    driver, handle = _driver(), _Handle()
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), memory.data_ptr()))
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base))
    return bytes(handle), memory.data_ptr() - base.value


def open_memory(handle: bytes) -> int:
    """Returns the address of another process's memory, for copies of the current device until `close_memory`.

    Raises:
        RuntimeError: the current device has no access to it.
    """
    address = ctypes.c_uint64()
    opened = _Handle.from_buffer_copy(handle)
    _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, _LAZY_PEER_ACCESS))
    return address.value


def close_memory(address: int) -> None:
    """Unmaps memory at an address that `open_memory` has returned. No copy from it is under way."""
    _check(_driver().cuIpcCloseMemHandle(address))


def _driver() -> Any:
    torch.cuda.current_stream().synchronize()  # as any call that makes the runtime use the driver, it sets the context
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, address = ctypes.c_void_p, ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = (pointer, pointer, address)
    driver.cuIpcGetMemHandle.argtypes = (pointer, address)
    driver.cuIpcOpenMemHandle_v2.argtypes = (pointer, _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (address,)
    return driver


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"memory of other processes can't be used: CUDA driver error {result}")
