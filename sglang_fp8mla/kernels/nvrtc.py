"""Compile CUDA C++ with NVRTC, keep the machine code on disk, launch it through the driver.

NVRTC and its bindings come with torch, so a user needs no nvcc. Importing this module loads
neither; the cache holds data only (a digest and a cubin), and a damaged entry is compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import IncompatibleEnvironment

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_ATTR_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ATTR_PROGRAMMATIC_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class CompilerMissing(IncompatibleEnvironment):
    """NVRTC is not installed, and the cache has no machine code for this kernel."""


class CompileFailed(IncompatibleEnvironment):
    """NVRTC refused the source for this GPU; the message carries its log."""


class LaunchFailed(RuntimeError):
    """The CUDA driver returned an error; a bug or a broken device."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sglang_fp8mla`, or `~/.cache/sglang_fp8mla`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "sglang_fp8mla"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as exc:  # RuntimeError: the library itself is missing
        raise CompilerMissing(
            f"nvrtc: cuda.bindings.nvrtc must be importable, got {exc!r}; "
            "install cuda-bindings and nvidia-cuda-nvrtc for torch's CUDA version"
        ) from exc
    return nvrtc


def compiler_version() -> str:
    """NVRTC's version, or `missing`. Part of the cache key."""
    try:
        _, major, minor = _nvrtc().nvrtcVersion()
    except CompilerMissing:
        return "missing"
    return f"{major}.{minor}"


def compile_cubin(source: str, *, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Compile `source` for `arch` (such as `sm_90a`). No GPU is needed.

    Raises:
        CompilerMissing: NVRTC cannot be loaded.
        CompileFailed: with the compiler's log.
    """
    nvrtc = _nvrtc()

    def check(code: Any, *values: Any) -> Any:
        if int(code) != 0:
            raise CompileFailed(f"nvrtc: the call must succeed, got {code!r}")
        return values[0] if values else None

    program = check(*nvrtc.nvrtcCreateProgram(source.encode(), b"mla_decode.cu", 0, [], []))
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    if int(code) != 0:
        size = check(*nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.decode(errors="replace").strip("\0 \n")
        raise CompileFailed(f"nvrtc: the source must compile for {arch}, got:\n{text}")
    size = check(*nvrtc.nvrtcGetCUBINSize(program))
    cubin: bytes = b" " * size
    check(*nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def cached_cubin(
    source: str, *, arch: str, options: tuple[str, ...] = (), directory: Path | None = None
) -> bytes:
    """`compile_cubin`, kept on disk by source, options, arch and compiler version."""
    directory = cache_dir() if directory is None else directory
    parts = (source, arch, *options, compiler_version())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = directory / f"{key}.cubin"
    try:
        blob = path.read_bytes()
    except OSError:
        blob = b""
    cubin = blob[_DIGEST_BYTES:]
    if cubin and hashlib.sha256(cubin).digest() == blob[:_DIGEST_BYTES]:
        return cubin
    cubin = compile_cubin(source, arch=arch, options=options)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # a rename within one directory is atomic: processes that start together see all or nothing
        handle, temporary = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, path)
    except OSError as exc:
        logger.warning(
            "kernel cache %s is not writable (%s): every start compiles again", directory, exc
        )
    return cubin


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise IncompatibleEnvironment(
            f"nvrtc: libcuda.so.1 must be loadable, got {exc}; install the NVIDIA driver"
        ) from exc


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise LaunchFailed(f"{what}: CUDA error {code}, {message}")


class Module:
    """One cubin loaded into the current context; kernels are found by name and kept."""

    def __init__(self, cubin: bytes) -> None:
        self._handle = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), cubin), "cuModuleLoadData")

    def function(self, name: str, shared: int = 0) -> ctypes.c_void_p:
        """The kernel `name`, allowed `shared` bytes of dynamic shared memory."""
        if name not in self._functions:
            found = ctypes.c_void_p()
            driver = _driver()
            code = driver.cuModuleGetFunction(ctypes.byref(found), self._handle, name.encode())
            _check(code, f"cuModuleGetFunction({name})")
            if shared:
                code = driver.cuFuncSetAttribute(found, _ATTR_MAX_DYNAMIC_SHARED, shared)
                _check(code, f"{name} with {shared} bytes of shared memory")
            self._functions[name] = found
        return self._functions[name]

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        *args: Any,
        shared: int = 0,
        stream: int = 0,
        overlap: bool = False,
    ) -> None:
        """Launch on `stream`.

        Args:
            args: ctypes values, in the kernel's order.
            overlap: let the kernel start while the one before it drains; it must wait
                (`griddepcontrol.wait`) before it reads that one's results. sm_90 and newer.
        """
        config = _LaunchConfig()
        config.grid[:] = (grid[0], grid[1], 1)
        config.block[:] = (threads, 1, 1)
        config.shared = shared
        config.stream = stream
        if overlap:
            attribute = _LaunchAttribute(id=_ATTR_PROGRAMMATIC_LAUNCH)
            attribute.value[0] = 1
            config.attributes = ctypes.pointer(attribute)
            config.num_attributes = 1
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        function = self.function(name, shared)
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
        _check(code, f"launch of {name}")
