"""`sglang.launch_server` with SGLang's batch-invariant GEMMs and norms under FlashInfer's MLA.

    python -m bench.load.deterministic LAUNCH_SERVER_ARGUMENTS --enable-deterministic-inference

SGLang refuses `--enable-deterministic-inference` for absorbed MLA over `flashinfer`, and rightly:
FlashInfer's MLA plan cuts the keys by the load of the whole batch. The refusal is one list, to
which this adds the name, for a measurement in which the rest is kept still: decode is ours and
batch-invariant, prefill batches hold one request (`--prefill-max-requests 1`), and that request
finds the same cached prefix each time. Nothing else of SGLang is changed. Not for serving.
"""

from __future__ import annotations

import os
import sys


def admit_flashinfer() -> None:
    """Let argument resolution take `flashinfer`, and so our name, as it takes `triton`."""
    # sglang 0.5.23: handle_deterministic_inference reads this list at each resolution
    from sglang.srt.arg_groups.choices import RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND

    if "flashinfer" not in RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("flashinfer")


def main() -> None:
    """What `sglang.launch_server` does as a program, after `admit_flashinfer`."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    admit_flashinfer()
    server_args = prepare_server_args(sys.argv[1:])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
