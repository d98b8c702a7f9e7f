"""The launcher's contract and the compiler's cache, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from mla_decode_cases import SM_SCALE, make_case

from sglang_fp8mla.errors import InvalidArgument
from sglang_fp8mla.kernels import mla_decode, nvrtc
from sglang_fp8mla.kernels.mla_decode import CudaConfig, MlaDecodePlan, choose_config, supported

GOOD = ((9, 0), 16, torch.bfloat16, torch.float8_e4m3fn, 512, 64)
E5M2 = "float8_e5m2"


class Recorder:
    """A module that launches nothing and remembers what it was asked."""

    def __init__(self):
        self.launches = []

    def launch(self, name, grid, threads, *args, shared=0, stream=0, overlap=False):
        self.launches.append((name, grid, threads, shared))


def make_plan(**options):
    defaults = {
        "max_bs": 4, "num_heads": 16, "device": "cpu", "q_dtype": torch.bfloat16,
        "pool_dtype": torch.float8_e4m3fn, "backend": "cuda", "_module": Recorder(),
    }  # fmt: skip
    return MlaDecodePlan(**{**defaults, **options})


def launched(plan):
    return plan._shapes[0].module.launches  # the recorder is the same for all shapes


def run(plan, case, **changes):
    operands = {
        "q_nope": case.q_nope, "q_pe": case.q_pe, "pool": case.pool, "kv_indices": case.kv_indices,
        "kv_indptr": case.kv_indptr, "out": case.out, "sm_scale": SM_SCALE,
    }  # fmt: skip
    return plan.run(**{**operands, **changes})


def test_supported_shapes():
    assert supported(*GOOD).ok
    assert supported((12, 0), 128, "float16", E5M2, 512, 0).ok


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({0: (7, 5)}, "GPU must be SM80 or newer, got SM75"),
        ({1: 129}, "num_heads must be 1 to 128, got 129"),
        ({1: 0}, "num_heads must be 1 to 128, got 0"),
        ({2: torch.float32}, "q must be bfloat16 or float16, got float32"),
        ({3: torch.uint8}, "pool must be float8_e4m3fn or float8_e5m2, got uint8"),
        ({4: 256}, "ckv must have 512 columns, got 256"),
        ({5: 128}, "kpe must have 0 or 64 columns, got 128"),
    ],
)
def test_refuses_other_shapes_with_the_reason(change, found):
    check = supported(*(change.get(i, value) for i, value in enumerate(GOOD)))
    assert not check.ok
    assert check.found == found
    assert check.fix == "use gather_cast"


def test_every_reason_is_listed():
    check = supported((7, 5), 0, torch.float32, torch.uint8, 256, 32)
    assert check.found.count("; ") == 5


def test_constructor_refuses():
    with pytest.raises(InvalidArgument, match=re.escape("num_heads must be 1 to 128, got 200")):
        make_plan(num_heads=200)
    with pytest.raises(InvalidArgument, match="max_bs must be at least 1, got 0"):
        make_plan(max_bs=0)
    with pytest.raises(InvalidArgument, match="split_len must be at least 1, got 0"):
        make_plan(split_len=0)
    with pytest.raises(InvalidArgument, match="backend must be cuda or triton, got 'hip'"):
        make_plan(backend="hip")


def test_plan_refuses():
    plan = make_plan()
    indptr = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="plan: bs must be 0 to 4, got 5"):
        plan.plan(indptr, 5)
    with pytest.raises(InvalidArgument, match="plan: kv_indptr must have 5 entries, got 3"):
        plan.plan(indptr[:3], 4)
    with pytest.raises(InvalidArgument, match="plan: kv_indptr must be contiguous int32"):
        plan.plan(indptr.long(), 4)


def test_run_refuses():
    plan, case = make_plan(), make_case([3, 4], heads=16)
    bad = [
        ({"q_nope": case.q_nope[:, :8]}, "run: q_nope must be [2, 16, 512] torch.bfloat16"),
        ({"q_pe": None}, "run: q_pe must be a tensor for kpe_dim 64, got None"),
        ({"q_pe": case.q_pe.half()}, "run: q_pe must be [2, 16, 64] torch.bfloat16"),
        ({"out": case.out[..., ::2]}, "run: out must be [2, 16, 512] torch.bfloat16"),
        ({"pool": case.pool.view(torch.uint8)}, "run: pool must be [slots, 1, 576]"),
        ({"pool": case.pool[..., :512]}, "run: pool must be [slots, 1, 576]"),
        ({"kv_indices": case.kv_indices.long()}, "run: kv_indices must be contiguous 1-D int32"),
        ({"kv_indices": case.kv_indices[::2]}, "run: kv_indices must be contiguous 1-D int32"),
        ({"lse_log2": torch.zeros(2, 15)}, "run: lse_log2 must be [2, 16] torch.float32"),
    ]
    for change, message in bad:
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            run(plan, case, **change)
    wide = torch.zeros(20, 1, 584, dtype=torch.uint8).view(torch.float8_e4m3fn)[..., :576]
    with pytest.raises(InvalidArgument, match="run: pool must have contiguous rows, 16-byte"):
        run(plan, case, pool=wide)
    odd = torch.zeros(2, 16, 513, dtype=torch.bfloat16)[..., :512]
    with pytest.raises(InvalidArgument, match="run: q_nope must have a contiguous last dim"):
        run(plan, case, q_nope=odd)
    assert launched(plan) == []


def test_grids_do_not_depend_on_lengths():
    """What a CUDA graph captures: two batches, the same launches."""
    plan = make_plan()
    for lens in ([1, 1], [500, 90]):
        case = make_case(lens, heads=16)
        plan.plan(case.kv_indptr, 2)
        run(plan, case)
    names = [launch[0] for launch in launched(plan)]
    assert names[:4] == ["mla_decode_plan", "mla_decode_plan", "mla_decode", "mla_decode_merge"]
    assert launched(plan)[:4] == launched(plan)[4:]


def test_shape_of_the_kernel_follows_the_rows():
    """A graph of 64 rows keeps its grid although a batch of one was planned last."""
    plan = make_plan(max_bs=64)
    few, many = plan._shapes
    assert few.workers < many.workers
    for rows in (1, 2, 3, 64, 1):
        case = make_case([5] * rows, heads=16)
        run(plan, case)
        plan.plan(torch.zeros(2, dtype=torch.int32), 1)
    grids = [launch[1][0] for launch in launched(plan) if launch[0] == "mla_decode"]
    assert grids == [few.workers, few.workers, many.workers, many.workers, few.workers]


def test_every_shape_has_its_own_work_list():
    plan = make_plan(max_bs=64)
    few, many = plan._shapes
    assert few.work.data_ptr() != many.work.data_ptr()
    for shape in plan._shapes:
        assert shape.work.numel() == 8 + 4 * shape.workers + 13 * 64 + 1


def test_batch_invariant_mode_has_one_shape():
    plan = make_plan(max_bs=64, split_len=256)
    assert [shape.config for shape in plan._shapes] == [choose_config((9, 0), 16, 64)]


def test_no_rows_launch_nothing():
    plan, case = make_plan(), make_case([], heads=16)
    run(plan, case)
    assert launched(plan) == []


def test_workspace_is_what_is_allocated():
    for options in ({}, {"split_len": 256}, {"num_heads": 128}):
        plan = make_plan(**options)
        held = [plan._part_out, plan._part_lse, *(shape.work for shape in plan._shapes)]
        assert plan.workspace_bytes == sum(x.numel() * x.element_size() for x in held)


@pytest.mark.parametrize("heads", [1, 8, 9, 16, 17, 64, 128])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_blocks_fit_shared_memory(capability, heads):
    """227 KB on SM90 and SM100, 163 on SM80, 99 on SM86, SM89, SM120; a block reserves 1 KB."""
    configs = [choose_config(capability, heads, bs) for bs in (1, 64)]
    total = {(8, 0): 164, (9, 0): 228, (10, 0): 228}.get(capability, 100) * 1024
    for config in configs:
        for kpe_dim in (0, 64):
            assert config.min_blocks * (config.shared_bytes(kpe_dim) + 1024) <= total


def _resources(cubin: bytes, directory: Path) -> dict[str, dict[str, int]]:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("needs cuobjdump from triton's package")
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run(
        [str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"Function (\w+):\s+(.*)", text)
    return {n: {k: int(v) for k, v in re.findall(r"([A-Z]+):(\d+)", row)} for n, row in found}


ARCHS = {
    "sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0),
    "sm_100": (10, 0), "sm_120": (12, 0),
}  # fmt: skip


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("arch", "bs"), [*((arch, 64) for arch in ARCHS), pytest.param("sm_90a", 1, id="sm_90a-small")]
)
def test_compiles_without_spills(arch, heads, bs, tmp_path):
    """NVRTC alone, no header and no GPU; a spill in this loop is a slow kernel."""
    pytest.importorskip("cuda.bindings.nvrtc")
    assert mla_decode.architecture(ARCHS[arch]) == arch
    config = choose_config(ARCHS[arch], heads, bs)
    options = config.options(kpe_dim=64, e5m2=False, q_bf16=True)
    cubin = nvrtc.compile_cubin(mla_decode.cuda_source(), arch=arch, options=options)
    for name, usage in _resources(cubin, tmp_path).items():
        assert usage["STACK"] == usage["LOCAL"] == 0, f"{name} on {arch}: {usage}"


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("q_bf16", [False, True])
@pytest.mark.parametrize("kpe_dim", [0, 64])
def test_every_option_compiles(e5m2, q_bf16, kpe_dim):
    pytest.importorskip("cuda.bindings.nvrtc")
    config = CudaConfig(64, 2, 3, True, 1)
    options = config.options(kpe_dim=kpe_dim, e5m2=e5m2, q_bf16=q_bf16)
    assert nvrtc.compile_cubin(mla_decode.cuda_source(), arch="sm_90a", options=options)


TINY = 'extern "C" __global__ void k(int* x) { *x = 1; }'


def test_cache_serves_the_second_process(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    first = nvrtc.cached_cubin(TINY, arch="sm_80", directory=tmp_path)
    monkeypatch.setattr(nvrtc, "compile_cubin", None)
    assert nvrtc.cached_cubin(TINY, arch="sm_80", directory=tmp_path) == first


def test_cache_keys_what_changes_the_code(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    nvrtc.cached_cubin(TINY, arch="sm_80", directory=tmp_path)
    nvrtc.cached_cubin(TINY, arch="sm_90", directory=tmp_path)
    nvrtc.cached_cubin(TINY, arch="sm_80", options=("-DX=1",), directory=tmp_path)
    nvrtc.cached_cubin(TINY + " ", arch="sm_80", directory=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 5000])
def test_damaged_cache_is_compiled_again(damage, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    first = nvrtc.cached_cubin(TINY, arch="sm_80", directory=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert nvrtc.cached_cubin(TINY, arch="sm_80", directory=tmp_path) == first
    assert path.read_bytes()[32:] == first


def test_unwritable_cache_still_compiles(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert nvrtc.cached_cubin(TINY, arch="sm_80", directory=blocked)


def test_compile_error_carries_the_log():
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(nvrtc.CompileFailed, match=r"must compile for sm_80.*\n.*error"):
        nvrtc.compile_cubin("nonsense", arch="sm_80")


def test_missing_compiler_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(nvrtc.CompilerMissing, match="install cuda-bindings and nvidia-cuda-nvrtc"):
        nvrtc.compile_cubin(TINY, arch="sm_80")
    assert nvrtc.compiler_version() == "missing"
