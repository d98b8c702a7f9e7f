"""Build stock `flashinfer` or our backend with one path forced, by name, on the CPU or a GPU.

On the CPU the device looks like an H200 to the choice of a path. The probe runs for real, over
whatever stands in for FlashInfer's kernel (`cpu_sglang`), and its finding is kept for the session,
as in a server; a test that breaks a kernel clears `probe.run_probe` before and after.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

STOCK = "flashinfer"
OURS = "flashinfer_mla_fp8"


@contextlib.contextmanager
def forced(
    decode: str = "auto", extend: str = "auto", capability: tuple[int, int] = (9, 0)
) -> Iterator[pytest.MonkeyPatch]:
    """Our name registered and the paths set; without a GPU, one of `capability` is pretended."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_fp8mla import backend, plugin, probe

    plugin.register()
    HookRegistry.apply_hooks()  # what load_plugins does after registering
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_FP8MLA_DECODE_PATH", decode)
        patch.setenv("SGLANG_FP8MLA_EXTEND_PATH", extend)
        patch.setattr(backend, "_logged", set())
        if not torch.cuda.is_available():
            facts_of = backend.facts_of

            def pretend(*args: Any) -> probe.Facts:
                return replace(facts_of(*args), device_name="NVIDIA H200", capability=capability)

            patch.setattr(backend, "facts_of", pretend)
        yield patch


def write_profile(file: Path, decode: dict[int, str], extend: str, sm: str = "SM90") -> str:
    """A measured table that takes `decode`'s paths by batch size; returns the file's name."""
    rules = [{"max_heads": 128, "max_batch": n, "path": path} for n, path in decode.items()]
    entry = {
        "source": "a test",
        "decode": rules,
        "extend": [{"max_heads": 128, "max_batch": 1 << 20, "path": extend}],
    }
    file.write_text(json.dumps({"schema": 1, "generations": {sm: entry}}))
    return str(file)


@contextlib.contextmanager
def arm(name: str) -> Iterator[str]:
    """`stock`, a path of ours, or `mixed`; gives the registered backend name to build with.

    `fused` has no extend phase: there `auto` decides. `mixed` takes another path for each size of
    a decode batch: one request `fused`, up to three `native`, more `gather_cast`.
    """
    if name == "stock":
        yield STOCK
        return
    if name == "mixed":
        with tempfile.TemporaryDirectory() as folder, forced() as patch:
            decode = {1: "fused", 3: "native", 1 << 20: "gather_cast"}
            file = write_profile(Path(folder) / "profile.json", decode, "native")
            patch.setenv("SGLANG_FP8MLA_PROFILE", file)
            yield OURS
        return
    with forced(name, "auto" if name == "fused" else name):
        yield OURS
