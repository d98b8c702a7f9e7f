"""The offline door: `sglang.Engine` with our backend, one batch, in a process of its own.

python bench/serve/engine.py MODEL_DIR
"""

from __future__ import annotations

import sys


def main() -> None:
    """Two prompts of different lengths; prints how many tokens came back."""
    import sglang

    engine = sglang.Engine(
        model_path=sys.argv[1],
        skip_tokenizer_init=True,
        attention_backend="flashinfer_mla_fp8",
        kv_cache_dtype="fp8_e4m3",
        max_total_tokens=65536,
        cuda_graph_max_bs_decode=8,
        sampling_backend="pytorch",
        flashinfer_mla_disable_ragged=True,
        disable_prefill_cuda_graph=True,
    )
    try:
        answers = engine.generate(
            input_ids=[list(range(5, 105)), list(range(5, 13))],
            sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        )
        print("sglang.Engine:", [len(answer["output_ids"]) for answer in answers], "tokens")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
