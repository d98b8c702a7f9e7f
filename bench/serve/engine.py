"""The offline door: `sglang.Engine` under both names, each in a process of its own.

    python -m bench.serve.engine MODEL_DIR

Ours takes gather_cast in both phases, which is stock's computation, so its tokens must be stock's.
Exit 1 when they are not.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from bench.serve.spec_ab import common_tokens

NAMES = ("flashinfer", "flashinfer_mla_fp8")
# lengths of the prompts, and new tokens
PROMPTS, NEW = (100, 8, 1500), 16


def answer(number: int, model: str) -> list[list[int]]:
    """The tokens that an engine with the `number`th backend gives, a list a prompt."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        skip_tokenizer_init=True,
        attention_backend=NAMES[number],
        kv_cache_dtype="fp8_e4m3",
        max_total_tokens=65536,
        mem_fraction_static=0.8,
        cuda_graph_max_bs_decode=8,
        sampling_backend="pytorch",
        flashinfer_mla_disable_ragged=True,
        disable_prefill_cuda_graph=True,
        disable_radix_cache=True,
        random_seed=1,
        # two engines boot at the same time: no port that either may take is the other's
        port=19000 + 800 * number,
    )
    try:
        answers = engine.generate(
            input_ids=[[(7 * i + 13 * n) % 31000 + 5 for i in range(n)] for n in PROMPTS],
            sampling_params={"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
        )
        return [list(one["output_ids"]) for one in answers]
    finally:
        engine.shutdown()


def main() -> None:
    """Run both, print how many tokens of ours are stock's."""
    model = sys.argv[1]
    for phase in ("DECODE", "EXTEND"):
        os.environ[f"SGLANG_FP8MLA_{phase}_PATH"] = "gather_cast"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        stock, ours = pool.map(answer, range(2), [model] * 2)
    equal, total = common_tokens(ours, stock)
    lengths = sorted({len(tokens) for tokens in stock + ours})
    print(f"sglang.Engine: {equal} of {total} tokens as stock, lengths {lengths}")
    sys.exit(equal != total or lengths != [NEW])


if __name__ == "__main__":
    main()
