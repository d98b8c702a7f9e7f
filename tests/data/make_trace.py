"""Writes traces in the layout of torch 2.11-2.14's Chrome export, of a decode as SGLang runs it.

    python make_trace.py OUT [--megabytes 500] [--no-cast] [--eager] ...

Kernel names are those of the real kernels; times and counts are invented. Used where a real trace
would be too large to keep (500 MB), and to vary one thing at a time.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CAST = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const"
    "::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned "
    "int>, "
    "TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, "
    "at::native::memory::StoreWithCast<1> >(int, at::native::direct_copy_kernel_cuda(at::"
    "TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::"
    "{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>, TrivialOffsetCalculator<1, unsigned int>, "
    "TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, "
    "at::native::memory::StoreWithCast<1>)"
)
ATTENTION = (
    "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<flashinfer::mla::hopper::"
    "HopperKernelTraits<false, 2u, 512u, 64u, 64u, 64u, __nv_bfloat16, __nv_bfloat16, "
    "__nv_bfloat16, int> >(flashinfer::MLAParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int>)"
)
NORM = "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*)"
GEMM = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"
WRITE = "set_mla_kv_buffer_kernel"
GATHER = "_gather_cast_kernel"
ROPE = "void rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)"
ACT = "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu<float>)>(void*)"
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>"
COPY_FLOAT = CAST.replace("lambda()#12", "lambda()#7").replace("(c10::BFloat16)", "(float)")

_EVENT = """  {
    "ph": "X",
    "cat": "%s",
    "name": "%s",
    "pid": %s,
    "tid": %s,
    "ts": %.3f,
    "dur": %.3f
    ,
    "args": {
      %s
    }
  }"""


@dataclass(frozen=True)
class Case:
    """What the trace shows. Times in microseconds; `cast` is stock, without it `gather` is ours."""

    layers: int = 61
    steps: int = 4
    pool: int = 495_553
    live: int = 1100
    cast: bool = True
    gather: bool = False
    graph: bool = True
    marks: bool = True
    cpu: bool = True
    detailed: bool = True
    cast_us: float = 830.0
    prefill: bool = False
    # as the chunked prefix path does: a cast of that many live rows, then a GEMM, then attention
    prefix_rows: int = 0
    pid_prefix: str = ""
    megabytes: float = 0.0


def _gpu(case: Case, name: str, ts: float, dur: float, ext: int, corr: int, blocks: int) -> str:
    args = (
        f'"External id": {ext}, "queued": 0, "device": 0, "context": 1,\n      '
        f'"stream": 7, "correlation": {corr},\n      "registers per thread": 32,\n      '
        f'"shared memory": 0,\n      "blocks per SM": 1.0,\n      "warps per SM": 4.0,\n      '
        f'"grid": [{blocks}, 1, 1],\n      "block": [128, 1, 1],\n      '
        f'"est. achieved occupancy %": 40'
    )
    pid = f'"{case.pid_prefix} 0"' if case.pid_prefix else "0"
    return _EVENT % ("kernel", name, pid, "7", ts, dur, args)


def events(case: Case) -> Iterator[str]:
    """Every event as text, in the exporter's layout."""
    corr, ext = 100, 1000
    clock = 5_137_200_918_346.0
    cpu_clock = clock - 500.0
    pid = f'"{case.pid_prefix} 4242"' if case.pid_prefix else "4242"

    def launch(name: str, ts: float, corr: int) -> str:
        args = f'"External id": 0, "cbid": 211, "correlation": {corr}'
        return _EVENT % ("cuda_runtime", name, pid, "4242", ts, 4.0, args)

    modes = ["EXTEND"] * case.prefill + ["DECODE"] * case.steps
    for number, mode in enumerate(modes):
        tokens = case.live + number
        label = f"step[{mode} bs=1" + (" toks=1024" if mode == "EXTEND" else "")
        if case.detailed and mode == "DECODE":
            label += f" g_sq=1 g_sqsq=1 g_sqsk={tokens} g_sk={tokens}"
        label += "]"
        kernels: list[tuple[str, float, int]] = []
        for _ in range(case.layers):
            kernels += [(NORM, 2.1, 1), (GEMM, 5.5, 132), (ROPE, 1.8, 4), (WRITE, 1.9, 1)]
            if case.cast:
                kernels.append((CAST, case.cast_us, -(-case.pool * 576 // 512)))
            if case.prefix_rows:
                kernels.append((CAST, 12.0, -(-case.prefix_rows * 576 // 512)))
                kernels.append((GEMM, 9.0, 132))
            if case.gather:
                kernels.append((GATHER, 3.9, 264))
            kernels += [(ATTENTION, 13.6, 132), (GEMM, 6.0, 132), (NORM, 2.0, 1), (GEMM, 11.0, 132)]
            kernels += [(ACT, 1.7, 8), (GEMM, 7.0, 132)]
        # once per step, small, of the cast's template: the logits to float
        tail = [(COPY_FLOAT, 2.5, 250), (ARGMAX, 9.0, 1)]
        start_cpu = cpu_clock
        graph_corr = corr
        if case.graph and mode == "DECODE":
            if case.cpu:
                yield launch("cudaGraphLaunch", cpu_clock + 20, graph_corr)
            corr += 1
        gpu_start = clock
        for name, dur, blocks in kernels:
            corr_here = graph_corr
            ext += 1
            if not (case.graph and mode == "DECODE"):
                corr_here, corr = corr, corr + 1
                if case.cpu:
                    cpu_clock += 6.0
                    yield launch("cudaLaunchKernel", cpu_clock, corr_here)
                    if name == CAST:
                        rows = case.pool if case.cast else case.prefix_rows
                        args = (
                            f'"External id": {ext},"Record function id": 0, "Concrete Inputs": '
                            f'["", "", "False"], "Input type": ["c10::BFloat16", '
                            f'"c10::Float8_e4m3fn", "Scalar"], "Input Strides": [[576, 576, 1], '
                            f'[576, 576, 1], []], "Input Dims": [[{rows}, 1, 576], '
                            f'[{rows}, 1, 576], []], "Ev Idx": {ext}'
                        )
                        at = cpu_clock - 2
                        yield _EVENT % ("cpu_op", "aten::copy_", pid, "4242", at, 5, args)
            yield _gpu(case, name, clock, dur, ext, corr_here, blocks)
            clock += dur + 0.7
        gpu_end = clock
        if case.cpu and case.marks:
            args = f'"External id": {ext + 1},"Record function id": 0, "Ev Idx": 1'
            dur = cpu_clock - start_cpu + 100
            yield _EVENT % ("user_annotation", label, pid, "4242", start_cpu, dur, args)
        if case.marks:
            dev = f'"{case.pid_prefix} 0"' if case.pid_prefix else "0"
            args = f'"External id": {ext + 1}'
            dur = gpu_end - gpu_start
            yield _EVENT % ("gpu_user_annotation", label, dev, "7", gpu_start, dur, args)
        cpu_clock += 150
        for name, dur, blocks in tail:
            ext += 1
            if case.cpu:
                yield launch("cudaLaunchKernel", cpu_clock, corr)
            yield _gpu(case, name, clock, dur, ext, corr, blocks)
            corr += 1
            cpu_clock += 6
            clock += dur + 0.7
        clock += 40.0
        cpu_clock = max(cpu_clock, clock - 500.0)


_FRAME = '"python id": %d, "Python parent id": %d, "Python module id": 17, "Ev Idx": %d'
_FRAME_NAME = "/usr/lib/python3/dist-packages/sglang/srt/models/deepseek_v2.py(%d): forward"


def write(case: Case, path: Path) -> None:
    """Write the trace; `.gz` compresses it. Python frames fill it up to `case.megabytes`."""
    packed = path.suffix == ".gz"
    with gzip.open(path, "wt", compresslevel=1) if packed else path.open("w") as file:
        file.write(
            ' {\n    "schemaVersion": 1,\n    "deviceProperties": [\n      {\n        "id": 0, '
            '"name": "NVIDIA H200", "totalGlobalMem": 150109880320,\n        "computeMajor": 9, '
            '"computeMinor": 0\n      }\n    ],\n    \n      "trace_id": "FA8F",\n      '
            '"record_shapes": 1,\n      "host_name": "vm",\n    "displayTimeUnit": "ms",\n    '
            '"baseTimeNanoseconds": 1790857026000000000,\n    "traceEvents": [\n    \n'
            '  {\n    "ph": "M",\n    "name": "process_name",\n    "ts": 5137200918346.595,\n    '
            '"pid": 4242,\n    "tid": 0,\n    "args": {\n      "name": "sglang"\n    }\n  }'
        )
        written = 0
        for event in events(case):
            written += file.write(",\n" + event)
        number = 0
        while written < case.megabytes * 1e6:
            args = _FRAME % (number, number // 2, number)
            text = _EVENT % (
                "python_function", _FRAME_NAME % (number % 3000), "4242", "4242",
                5_137_200_918_346.0 + number, 11.0, args,
            )  # fmt: skip
            written += file.write(",\n" + text)
            number += 1
        file.write(f'\n  ],\n  "traceName": "{path}"\n }}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-cast", action="store_true")
    parser.add_argument("--gather", action="store_true")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    case = Case(
        steps=args.steps,
        cast=not args.no_cast,
        gather=args.gather,
        graph=not args.eager,
        megabytes=args.megabytes,
    )
    write(case, args.out)


if __name__ == "__main__":
    main()
