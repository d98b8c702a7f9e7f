"""The server runs that prove integration: sets of arms for `spec_ab`, stock's first in each group.

An arm is what serve_ab.py takes: words of the command line, `KEY:=VALUE` for the environment, and
`@DIR` in front for a model of its own. `{nextn}` is the checkpoint that `make_nextn` writes.
"""

from __future__ import annotations

_STOCK = "--attention-backend,flashinfer,--kv-cache-dtype,fp8_e4m3"
_OURS = "--attention-backend,flashinfer_mla_fp8,--kv-cache-dtype,fp8_e4m3"
# bitwise stock's computation, so its tokens must be stock's
_EXACT = f"{_OURS},SGLANG_FP8MLA_DECODE_PATH:=gather_cast,SGLANG_FP8MLA_EXTEND_PATH:=gather_cast"

_CHAIN = "--speculative-num-steps,3,--speculative-eagle-topk,1,--speculative-num-draft-tokens,4"
_NEXTN = f"--speculative-algorithm,EAGLE,{_CHAIN}"
_ONE = (
    "--speculative-algorithm,EAGLE,--speculative-num-steps,1,--speculative-eagle-topk,1,"
    "--speculative-num-draft-tokens,2"
)
_CHECKPOINT = "@{nextn}"
_LOADED = "--load-format,auto"
# what the two GPUs need no compiler and no multicast for; servers that boot beside each other fill
# the GPUs at different times, which SGLang's check takes for a fault
_TWO = (
    "--tp-size,2,--disable-custom-all-reduce,--enforce-disable-flashinfer-allreduce-fusion,"
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK:=0"
)


def _group(name: str, *words: str, model: str = "", auto: bool = True) -> tuple[str, ...]:
    """Stock, ours bitwise, and ours as it chooses itself."""
    arms = {"stock": _STOCK, "exact": _EXACT} | ({"auto": _OURS} if auto else {})
    front = [model] if model else []
    return tuple(f"{name}.{arm}={','.join([*front, flags, *words])}" for arm, flags in arms.items())


SETS: dict[str, tuple[str, ...]] = {
    # NextN, dummy weights: nothing is accepted, every verify is alike, tokens must be equal
    "nextn-dummy": _group("dummy", _NEXTN),
    # one drafted token a step, accepted or not: it comes out of draft extend alone, so ours and
    # stock's draft alike, and tokens and accepted lengths must be equal
    "nextn-one": _group("nextn1", _ONE, _LOADED, model=_CHECKPOINT),
    # three drafted tokens: no `.exact` arm, since stock's draft steps plan with lengths that lack
    # the draft's own tokens (docs/compat.md); other drafts are verified in other batches, and round
    # otherwise. What it shows is the accepted length beside stock's
    "nextn-three": tuple(
        arm.replace("nextn3.exact", "nextn3.gather_cast")
        for arm in _group("nextn3", _NEXTN, _LOADED, model=_CHECKPOINT)
    ),
    # the checkpoint too: with dummy weights the tokens hardly depend on attention
    "one": (f"one.stock={_CHECKPOINT},{_STOCK},{_LOADED}",),
    "tp2": _group("tp2", _TWO, _LOADED, model=_CHECKPOINT, auto=False),
    "dp2": _group(
        "dp2", _TWO, _LOADED, "--dp-size,2,--enable-dp-attention", model=_CHECKPOINT, auto=False
    ),
    "dcp2": _group("dcp2", _TWO, _LOADED, "--dcp-size,2", model=_CHECKPOINT, auto=False),
}


def _feature(name: str, *words: str) -> tuple[str, ...]:
    return _group(name, _LOADED, *words, model=_CHECKPOINT, auto=False)


def _draft(name: str) -> tuple[str, ...]:
    path = f"--speculative-draft-model-path,{{nextn}}-{name}"
    # FlashInfer's MHA kernels would be compiled first, for minutes
    backend = "--speculative-draft-attention-backend,triton"
    return path, "--speculative-draft-load-format,dummy", backend


# one phase by flashinfer or by ours, the other by another backend
_DECODE_ONLY = "--kv-cache-dtype,fp8_e4m3,--prefill-attention-backend,triton"
_HYBRID = "--kv-cache-dtype,fp8_e4m3,--page-size,64,--decode-attention-backend,flashmla"
_NGRAM = "--speculative-algorithm,NGRAM,--speculative-num-draft-tokens,4"
# what SGLang's own check asks for beside the flag
_PDMUX = "--enable-pdmux,--chunked-prefill-size,-1,--disable-overlap-schedule"
_PDMUX_GROUPS = "--pdmux-config-path,{nextn}-sarvam/pdmux.yaml"
SETS |= {
    "features-a": (
        *_feature("page64", "--page-size,64"),
        *_feature("e5m2", "--kv-cache-dtype,fp8_e5m2"),
        # prefix hits, and long prefixes by chunks of MHA
        *_feature("radix", "!disable-radix-cache"),
        *_feature("hicache", "!disable-radix-cache,--enable-hierarchical-cache"),
        *_feature("mixed", "--enable-mixed-chunk,--chunked-prefill-size,512"),
    ),
    "features-b": (
        *_feature("ngram", _NGRAM),
        *_feature("eager", "--disable-cuda-graph"),
        # spec_ab sleeps and wakes a server that has this flag
        *_feature("saver", "--enable-memory-saver"),
        *(
            f"hybrid.{arm}={_CHECKPOINT},--prefill-attention-backend,{backend},{_HYBRID},{_LOADED}"
            for arm, backend in (("stock", "flashinfer"), ("exact", "flashinfer_mla_fp8"))
        ),
    ),
    "features-c": (
        *_feature("ngram16", _NGRAM, "--page-size,16"),
        *_feature("bf16", "--kv-cache-dtype,bfloat16"),
        *_feature("fp4", "--kv-cache-dtype,fp4_mx_block16"),
        *(
            f"decode.{arm}={_CHECKPOINT},--decode-attention-backend,{backend},{_DECODE_ONLY},"
            f"{_LOADED},SGLANG_FP8MLA_DECODE_PATH:=gather_cast"
            for arm, backend in (("stock", "flashinfer"), ("exact", "flashinfer_mla_fp8"))
        ),
    ),
    "features-d": (
        # MHA drafts, of which nothing is accepted
        *_feature("eagle3", "--speculative-algorithm,EAGLE3", *_draft("eagle3"), _CHAIN),
        *_feature("dflash", "--speculative-algorithm,DFLASH", *_draft("dflash")),
        # spec_ab gives every second request the adapter
        *_feature("lora", "--lora-paths,adapter={nextn}-lora"),
        # prefill by Triton: of FlashInfer's MHA kernels only decode's has to be compiled there
        *_group(
            "mha",
            _LOADED,
            "--prefill-attention-backend,triton,--kv-cache-dtype,bfloat16",
            model="@{nextn}-mha",
            auto=False,
        ),
    ),
    "features-e": (
        # requests come back from the host: spec_ab asks for more between than the pool holds
        *_feature(
            "evict",
            "!disable-radix-cache,--enable-hierarchical-cache,--hicache-ratio,8",
            "--max-total-tokens,16384",
        ),
        # weights and graphs too
        *_feature(
            "asleep",
            "--enable-memory-saver,--enable-weights-cpu-backup",
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH:=1",
        ),
        # a decode server that is told that its prompts have come, and reads rows that nobody sent
        *_feature("pd", "--disaggregation-mode,decode,--disaggregation-transfer-backend,fake"),
        # DeepSeek cannot be split by layers, and FlashInfer MLA's cooperative launch asks for every
        # SM of the GPU, of which a graph's stream has a part
        *_feature("pdmux-deepseek", _PDMUX, "--disable-cuda-graph"),
    ),
    "features-f": (
        *(
            arm
            for name, *words in (
                ("pdmux", _PDMUX_GROUPS, "--disable-cuda-graph"),
                ("pdmux-graph", _PDMUX_GROUPS),
            )
            for arm in _group(name, _LOADED, _PDMUX, *words, model="@{nextn}-sarvam", auto=False)
        ),
        # dense layers run whole, and the halves are planned and thrown away; MoE layers would need
        # an all-to-all library
        *_group(
            "tbo",
            _TWO,
            _LOADED,
            "--dp-size,2,--enable-dp-attention,--enable-two-batch-overlap",
            model=_CHECKPOINT,
            auto=False,
        ),
        # SGLang verified MLA with fa3 alone; here both names go the same way, to the end or not
        *_feature("cp", _TWO, "--enable-prefill-cp,--cp-strategy,zigzag"),
    ),
    # minutes of compiling: the others would wait for it
    "compile": (
        # no `.exact` arm: SGLang has inductor choose the blocks of its reductions by timing, so two
        # servers may add in different orders; its own mode, max-autotune, would choose GEMMs so too
        *(
            arm.replace("compile.exact", "compile.gather_cast")
            for arm in _feature(
                "compile",
                "--enable-torch-compile,--torch-compile-max-bs,2",
                "SGLANG_TORCH_COMPILE_MODE:=default",
            )
        ),
    ),
}

# groups that stock is expected to end with an error, and then ours with the same
REFUSED = frozenset({"pdmux-deepseek", "pdmux-graph"})


def expand(words: list[str], nextn: str) -> list[str]:
    """Names of sets become their arms; anything with `=` is an arm already."""
    arms: list[str] = []
    for word in words:
        arms += [word] if "=" in word else [arm.format(nextn=nextn) for arm in SETS[word]]
    return arms
