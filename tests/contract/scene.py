"""A small MLA serving scene on real SGLang parts, and a float64 oracle over its pool's bytes.

The same scene runs on the CPU (with the fakes of `cpu_sglang`) and on a GPU (with none), so that a
test of a property is written once. Nothing here imports the package under test.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from contract.arms import OURS

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@functools.cache
def fp8_values(dtype: torch.dtype) -> torch.Tensor:
    """[256] float64: what each byte means, from the format's definition, not from torch's cast."""
    mantissa_bits, bias = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}[dtype]
    exponent_bits = 7 - mantissa_bits
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        if dtype == torch.float8_e4m3fn and code & 0x7F == 0x7F:
            value = math.nan
        elif dtype == torch.float8_e5m2 and exponent == 31:
            value = math.inf if mantissa == 0 else math.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        values.append(sign * value)
    return torch.tensor(values, dtype=torch.float64)


def dequantise(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a pool as float64, where they are; FP8 goes through the table above, by bytes."""
    if rows.dtype in FP8_DTYPES:
        codes = rows.contiguous().view(torch.uint8).long()
        return fp8_values(rows.dtype).to(rows.device)[codes]
    return rows.double()


def _visible(q_len: int, kv_len: int, causal: bool, device: torch.device) -> torch.Tensor:
    """[q_len, 1, kv_len] bool: token i sees the first kv_len - q_len + i + 1 rows."""
    keys = torch.arange(kv_len, device=device)
    if not causal:
        return (keys >= 0).expand(q_len, kv_len)[:, None]
    last = torch.arange(kv_len - q_len, kv_len, device=device)
    return (keys[None, :] <= last[:, None])[:, None]


def ref_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    *,
    ckv: int,
    sm_scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA of one request in float64, on the device of `rows`.

    Args:
        q: [q_len, num_heads, ckv + kpe], the last `q_len` tokens of the request.
        rows: [kv_len, ckv + kpe] float64, already dequantised.
        ckv: width of the value part of a row.
        sm_scale: softmax scale.
        causal: token i of q sees the first kv_len - q_len + i + 1 rows.

    Returns:
        [q_len, num_heads, ckv] float64 and lse_log2 [q_len, num_heads] float64. A token that sees
        nothing gives 0 and -inf.
    """
    q = q.to(rows.device).double()
    seen = _visible(q.shape[0], rows.shape[0], causal, rows.device)
    logits = (q @ rows.T * sm_scale).masked_fill(~seen, -math.inf)  # [q_len, num_heads, kv_len]
    # a token that sees nothing has logits of -inf alone, whose softmax is NaN
    weights = torch.softmax(logits, dim=-1).masked_fill(~seen, 0.0)
    return weights @ rows[:, :ckv], torch.logsumexp(logits, dim=-1) / math.log(2)


def assert_within_budget(
    name: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    baseline: torch.Tensor,
    *,
    eps: float,
    rms_ulp: float = 1.0,
) -> None:
    """Bound an output by what honest arithmetic in the same dtypes costs on the same data."""
    e = exact.double()
    a, b = actual.to(e.device).double(), baseline.to(e.device).double()
    error, base = (a - e).abs().max().item(), (b - e).abs().max().item()
    budget = 2 * (base + eps * e.abs().max().item())
    assert error <= budget, (
        f"{name}: max error {error:.3e} > budget {budget:.3e} (baseline {base:.3e})"
    )
    rms = ((a - e).pow(2).mean().sqrt() / e.pow(2).mean().sqrt().clamp_min(1e-30)).item()
    assert rms <= rms_ulp * eps, f"{name}: relative RMS {rms:.3e} > {rms_ulp * eps:.3e}"


def torch_attention(
    q: torch.Tensor, rows: torch.Tensor, *, ckv: int, sm_scale: float, causal: bool = True
) -> torch.Tensor:
    """`ref_attention` as flash kernels do it: 16-bit operands and probabilities, fp32 sums."""
    dtype = q.dtype
    q = q.to(rows.device)
    keys = rows.to(dtype).float()
    seen = _visible(q.shape[0], rows.shape[0], causal, rows.device)
    logits = (q.float() @ keys.T * sm_scale).masked_fill(~seen, -math.inf)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    numerator = weights.to(dtype).float() @ keys[:, :ckv]
    return (numerator / weights.sum(-1, keepdim=True)).to(dtype)


@dataclass(frozen=True)
class Shape:
    """What a scene is made of. Widths in values, sizes in tokens."""

    heads: int = 16
    ckv: int = 512
    kpe: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.float8_e4m3fn
    page_size: int = 1
    slots: int = 256
    max_bs: int = 8
    max_context: int = 128
    layers: int = 1

    @property
    def width(self) -> int:
        return self.ckv + self.kpe

    @property
    def sm_scale(self) -> float:
        return self.width**-0.5


@dataclass
class Request:
    """One request of a batch: its slots in token order, and its row in the request pool."""

    slots: list[int]
    row: int = 0
    q_len: int = 1


def make_requests(*slots: Sequence[int], q_lens: Sequence[int] | None = None) -> list[Request]:
    """Requests at rows 0, 1, … of the request pool."""
    q_lens = q_lens or [1] * len(slots)
    return [Request(list(s), row, q) for row, (s, q) in enumerate(zip(slots, q_lens))]


class Scene:
    """One backend over real pools.

    Args:
        backend: a name in SGLang's registry.
        shape: dimensions, dtypes and sizes.
        device: "cpu" or "cuda".
        **server_args: fields of SGLang's ServerArgs that differ from what the kit sets.
    """

    def __init__(
        self, backend: str, shape: Shape | None = None, device: str = "cpu", **server_args: Any
    ) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        self.shape = shape or Shape()
        self.device = device
        self.runner = make_runner(backend, self.shape, device, **server_args)
        self.pool = self.runner.token_to_kv_pool
        self.req_to_token = self.runner.req_to_token_pool.req_to_token
        self.backend = ATTENTION_BACKENDS[backend](self.runner)
        self.layers = [make_layer(self.shape, i) for i in range(self.shape.layers)]
        self._graph_ready = False

    # rows and slots -----------------------------------------------------------------------------

    def write(self, slots: Sequence[int], rows: torch.Tensor, layer: int = 0) -> None:
        """Store `rows` [n, width] through the pool's own write path, which casts them."""
        loc = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        rows = rows.to(self.device, self.shape.dtype)[:, None, :]
        ckv = self.shape.ckv
        if self.shape.kpe:
            self.pool.set_mla_kv_buffer(
                self.layers[layer], loc, rows[..., :ckv].contiguous(), rows[..., ckv:].contiguous()
            )
        else:
            self.pool.set_kv_buffer(self.layers[layer], loc, rows, rows)

    def poison(self, live: Iterable[int], byte: int = 0xFF) -> None:
        """Fill every slot not in `live`, the padding slot 0 included, with `byte`.

        0xFF is NaN in e4m3, e5m2, fp16 and bf16.
        """
        keep = torch.zeros(self.bytes_of(0).shape[0], dtype=torch.bool)
        keep[list(live)] = True
        for layer in range(self.shape.layers):
            self.bytes_of(layer)[~keep.to(self.device)] = byte

    def bytes_of(self, layer: int) -> torch.Tensor:
        """[slots, bytes per row] uint8 view of a layer's buffer."""
        buffer = self.pool.kv_buffer[layer]
        return buffer.view(buffer.shape[0], -1).view(torch.uint8)

    def rows(self, slots: Sequence[int], layer: int = 0) -> torch.Tensor:
        """[n, width] float64: the values that `slots` hold now."""
        taken = self.bytes_of(layer)[
            torch.tensor(list(slots), dtype=torch.long, device=self.device)
        ]
        return dequantise(taken.view(self.pool.dtype))

    def copy_pool(self, other: Scene) -> None:
        """Take every byte of `other`'s pool."""
        for mine, theirs in zip(self.pool.kv_buffer, other.pool.kv_buffer):
            mine.copy_(theirs)

    # batches ------------------------------------------------------------------------------------

    def batch(self, requests: Sequence[Request], mode: str = "decode") -> Any:
        """A ForwardBatch as the scheduler makes it; `mode` is decode, extend or idle."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        extend = mode == "extend"
        new = [r.slots[len(r.slots) - r.q_len :] if extend else r.slots[-1:] for r in requests]
        prefix = [len(r.slots) - r.q_len for r in requests]
        for request in requests:
            if request.slots:
                self.req_to_token[request.row, : len(request.slots)] = torch.tensor(
                    request.slots, dtype=self.req_to_token.dtype, device=self.device
                )
        lens = [len(r.slots) for r in requests]
        positions = [
            p + i for p, r in zip(prefix, requests) for i in range(r.q_len if extend else 1)
        ]
        num_tokens = sum(r.q_len for r in requests) if extend else len(requests)

        def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype, device=self.device)

        batch = ForwardBatch(
            forward_mode=ForwardMode[mode.upper()],
            batch_size=len(requests),
            input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
            req_pool_indices=ints([r.row for r in requests]),
            seq_lens=ints(lens),
            seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
            out_cache_loc=ints([s for part in new for s in part], torch.int64),
            seq_lens_sum=sum(lens),
            positions=ints(positions, torch.int64),
        )
        self.runner.kv_index_translator.bind_own_plan(batch)
        if extend:
            batch.extend_prefix_lens = ints(prefix)
            batch.extend_prefix_lens_cpu = prefix
            batch.extend_seq_lens = ints([r.q_len for r in requests])
            batch.extend_seq_lens_cpu = [r.q_len for r in requests]
            starts = [sum(r.q_len for r in requests[:i]) for i in range(len(requests))]
            batch.extend_start_loc = ints(starts)
            batch.extend_num_tokens = num_tokens
        return batch

    # forwards -----------------------------------------------------------------------------------

    def plan(self, batch: Any) -> None:
        """What the runner does once per step, before the layers."""
        with self.context():
            self.backend.init_forward_metadata(batch)

    def attend(
        self,
        batch: Any,
        q: torch.Tensor,
        new_rows: torch.Tensor | None = None,
        *,
        layer: int = 0,
        split: bool = True,
    ) -> Any:
        """One layer over a planned batch, as the model calls it.

        Args:
            batch: planned by `plan`.
            q: [num_tokens, heads, width].
            new_rows: [num_tokens, width] written before attending; None attends to what is there.
            layer: which layer.
            split: pass q and k in halves (the absorbed path of DeepSeek) or concatenated.
        """
        ckv = self.shape.ckv
        kwargs: dict[str, Any] = {}
        k = v = None
        q = q.to(self.device)
        if new_rows is not None:
            new_rows = new_rows.to(self.device, self.shape.dtype)[:, None, :]
            k, v = (
                (new_rows[..., :ckv].contiguous(),) * 2
                if split
                else (new_rows, new_rows[..., :ckv])
            )
            if split:
                kwargs["k_rope"] = new_rows[..., ckv:].contiguous()
        if split:
            kwargs["q_rope"] = q[..., ckv:].contiguous()
            q = q[..., :ckv].contiguous()
        with self.context():
            return self.layers[layer](
                q.flatten(1), k, v, batch, save_kv_cache=new_rows is not None, **kwargs
            )

    def run(
        self,
        requests: Sequence[Request],
        q: torch.Tensor,
        new_rows: torch.Tensor | None = None,
        mode: str = "decode",
        **kwargs: Any,
    ) -> torch.Tensor:
        """`batch`, `plan` and `attend`; the output as [num_tokens, heads, ckv]."""
        batch = self.batch(requests, mode)
        self.plan(batch)
        out = self.attend(batch, q, new_rows, **kwargs)
        return out.view(-1, self.shape.heads, self.shape.ckv)

    def context(self) -> Any:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        stack = _Stack(torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)))
        return stack

    # the oracle ---------------------------------------------------------------------------------

    def expected(
        self, requests: Sequence[Request], q: torch.Tensor, layer: int = 0, mode: str = "decode"
    ) -> torch.Tensor:
        """[num_tokens, heads, ckv] float64, from the pool's bytes as they are now."""
        return self._per_request(ref_attention, requests, q, layer, mode)

    def baseline(
        self, requests: Sequence[Request], q: torch.Tensor, layer: int = 0, mode: str = "decode"
    ) -> torch.Tensor:
        """[num_tokens, heads, ckv]: the same with 16-bit operands, for `assert_within_budget`."""
        return self._per_request(torch_attention, requests, q, layer, mode)

    def _per_request(
        self, attention: Any, requests: Sequence[Request], q: torch.Tensor, layer: int, mode: str
    ) -> torch.Tensor:
        parts, start = [], 0
        for request in requests:
            n = request.q_len if mode == "extend" else 1
            result = attention(
                q[start : start + n],
                self.rows(request.slots, layer),
                ckv=self.shape.ckv,
                sm_scale=self.shape.sm_scale,
            )
            parts.append(result[0] if isinstance(result, tuple) else result)
            start += n
        if not parts:
            return torch.zeros(0, self.shape.heads, self.shape.ckv, dtype=torch.float64)
        return torch.cat(parts)

    def check(
        self,
        name: str,
        out: torch.Tensor,
        requests: Sequence[Request],
        q: torch.Tensor,
        layer: int = 0,
        mode: str = "decode",
    ) -> None:
        """`out` is right: within the budget of its dtype against the oracle."""
        if not requests:
            assert out.numel() == 0, f"{name}: an empty batch gave {tuple(out.shape)}"
            return
        exact = self.expected(requests, q, layer, mode)
        # half an ulp relative: 2**-8 for bf16, 2**-11 for fp16, 2**-24 for fp32
        eps = torch.finfo(out.dtype).eps
        assert torch.isfinite(out).all(), f"{name}: output is not finite"
        assert_within_budget(name, out, exact, self.baseline(requests, q, layer, mode), eps=eps)

    # graphs -------------------------------------------------------------------------------------

    def capture(self, bs: int, layers: int | None = None) -> DecodeGraph:
        """Capture a decode graph of `bs` requests, as SGLang's decode runner does."""
        if not self._graph_ready:
            with self.context():
                self.backend.init_cuda_graph_state(self.shape.max_bs, self.shape.max_bs)
            self._graph_ready = True
        return DecodeGraph(self, bs, layers or self.shape.layers)


@dataclass
class DecodeGraph:
    """One captured decode batch size over static buffers.

    On a GPU the layers are recorded in a CUDA graph. On the CPU they are called again at replay
    with the metadata object of the capture, so whatever a replay must see has to be in tensors
    that the capture already held.
    """

    scene: Scene
    bs: int
    layers: int
    outputs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        scene, bs, shape = self.scene, self.bs, self.scene.shape
        device = scene.device
        self.q = torch.zeros(bs, shape.heads, shape.width, dtype=shape.dtype, device=device)
        self.new_rows = torch.zeros(self.layers, bs, shape.width, dtype=shape.dtype, device=device)
        # as at capture in SGLang: every lane has one token, in row 0 of the request pool
        self.batch = scene.batch([Request([0], 0) for _ in range(bs)])
        self.batch.req_pool_indices.zero_()
        self.batch.out_cache_loc.zero_()
        with scene.context():
            scene.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
            scene.backend.init_forward_metadata_in_graph(self.batch)
        self.metadata = scene.backend.forward_metadata
        self._graph: Any = None
        if device == "cuda":
            for _ in range(2):
                self._layers()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._layers()
            self._graph = graph
        else:
            self._layers()
        with scene.context():
            scene.backend.on_after_cuda_graph_warmup()

    def _layers(self) -> None:
        self.outputs = [
            self.scene.attend(self.batch, self.q, self.new_rows[layer], layer=layer)
            for layer in range(self.layers)
        ]

    def replay(
        self, requests: Sequence[Request], q: torch.Tensor, new_rows: torch.Tensor
    ) -> list[torch.Tensor]:
        """Replay with other requests; further lanes are padded as SGLang does: row 0, length 1.

        Args:
            requests: at most as many as were captured.
            q: [len(requests), heads, width], for every layer.
            new_rows: [len(requests), width] for every layer, or [layers, len(requests), width].

        Returns:
            One [len(requests), heads, ckv] tensor per layer.
        """
        scene, shape = self.scene, self.scene.shape
        n = len(requests)
        fresh = scene.batch(requests)
        lens = [len(r.slots) for r in requests] + [1] * (self.bs - n)
        self.q.zero_()
        self.q[:n] = q.to(scene.device)
        self.new_rows.zero_()
        self.new_rows[:, :n] = new_rows.to(scene.device, shape.dtype)
        self.batch.req_pool_indices.zero_()
        self.batch.req_pool_indices[:n] = fresh.req_pool_indices
        self.batch.seq_lens.fill_(1)
        self.batch.seq_lens[:n] = fresh.seq_lens
        self.batch.out_cache_loc.zero_()
        self.batch.out_cache_loc[:n] = fresh.out_cache_loc
        view = SimpleNamespace(
            batch_size=self.bs,
            forward_mode=self.batch.forward_mode,
            actual_forward_mode=self.batch.forward_mode,
            input_ids=self.batch.input_ids,
            positions=self.batch.positions,
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.batch.seq_lens,
            seq_lens_sum=sum(lens),
            seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
            encoder_lens=None,
            out_cache_loc=self.batch.out_cache_loc,
            kv_loc_plan=self.batch.kv_loc_plan,
            kv_loc_cols=self.batch.kv_loc_cols,
            spec_info=None,
        )
        with scene.context():
            scene.backend.init_forward_metadata_out_graph(view)
        if self._graph is not None:
            self._graph.replay()
        else:
            with scene.context():
                scene.backend.init_forward_metadata_in_graph(view)
            scene.backend.forward_metadata = self.metadata
            self._layers()
        return [o.view(self.bs, shape.heads, shape.ckv)[:n].clone() for o in self.outputs]


class _Stack:
    """Enter several context managers as one."""

    def __init__(self, *managers: Any) -> None:
        self.managers = managers

    def __enter__(self) -> None:
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for manager in reversed(self.managers):
            manager.__exit__(*exc)


def make_layer(shape: Shape, layer_id: int) -> Any:
    """SGLang's RadixAttention as DeepSeek's absorbed attention builds it."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(
        num_heads=shape.heads,
        head_dim=shape.width,
        scaling=shape.sm_scale,
        num_kv_heads=1,
        layer_id=layer_id,
        v_head_dim=shape.ckv,
    )


@functools.cache
def single_rank() -> Any:
    """Tell SGLang, once, that this process is one rank of one; the cache keeps the override."""
    from sglang.srt.runtime_context import get_parallel

    # importing the kit states attn_tp_size
    from sglang.test.kits.attention_unittest.attention_methods import (  # noqa: F401
        mla_attention,
    )

    override = get_parallel().override(attn_dcp_rank=0)
    override.__enter__()
    return override


def make_runner(backend: str, shape: Shape, device: str, **server_args: Any) -> Any:
    """The kit's model runner, with pools of our sizes and KV dtype."""
    single_rank()
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_context
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit

    # the kit's runner only asks a case for these
    case = kit.MLAAttentionCase(
        name="scene",
        backend=backend,
        forward_mode=ForwardMode.DECODE,
        num_heads=shape.heads,
        page_size=shape.page_size,
        prefix_lens=(0,) * shape.max_bs,
    )
    config = kit.TinyMLAModelConfig(
        num_heads=shape.heads,
        kv_lora_rank=shape.ckv,
        qk_rope_head_dim=shape.kpe,
        hidden_size=64,
        context_len=shape.max_context,
    )
    runner = kit.MockMLAModelRunner(
        case=case,
        model_config=config,
        dtype=shape.dtype,
        device=device,
        max_context_len=shape.max_context,
        kv_lora_rank=shape.ckv,
        qk_rope_head_dim=shape.kpe,
        disable_cuda_graph=False,
        fp8_kv_cache=shape.kv_dtype == torch.float8_e4m3fn,
    )
    names = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
    runner.kv_cache_dtype = shape.kv_dtype
    runner.kv_cache_dtype_str = names.get(shape.kv_dtype, "auto")
    if server_args:
        runner.server_args = (
            get_context()
            .override_server_args(kv_cache_dtype=runner.kv_cache_dtype_str, **server_args)
            .install()
        )
    runner.req_to_token_pool = ReqToTokenPool(
        size=shape.max_bs,
        max_context_len=shape.max_context,
        device=device,
        enable_memory_saver=False,
    )
    runner.token_to_kv_pool = MLATokenToKVPool(
        size=shape.slots,
        page_size=shape.page_size,
        dtype=shape.kv_dtype,
        kv_lora_rank=shape.ckv,
        qk_rope_head_dim=shape.kpe,
        layer_num=shape.layers,
        device=device,
        enable_memory_saver=False,
    )
    runner.max_total_num_tokens = shape.slots
    runner.init_kv_index_translator()
    return runner


def make_q(n: int, shape: Shape, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """[n, heads, width] of the model's dtype, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, shape.heads, shape.width, generator=generator) * scale).to(shape.dtype)


def make_rows(n: int, shape: Shape, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    """[n, width] float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, shape.width, generator=generator) * scale


def shuffled_slots(n: int, shape: Shape, seed: int = 2) -> list[int]:
    """`n` distinct slots, none of them the padding slot 0; pages shuffled, tokens in order."""
    page = shape.page_size
    generator = torch.Generator().manual_seed(seed)
    pages = (torch.randperm(shape.slots // page - 1, generator=generator) + 1).tolist()
    taken = [p * page + i for p in pages for i in range(page)]
    assert n <= len(taken), f"shuffled_slots: {n} slots wanted, {len(taken)} in the pool"
    return taken[:n]


__all__ = [
    "FP8_DTYPES",
    "DecodeGraph",
    "Request",
    "Scene",
    "Shape",
    "assert_within_budget",
    "dequantise",
    "fp8_values",
    "make_q",
    "make_requests",
    "make_rows",
    "make_runner",
    "ref_attention",
    "replace",
    "shuffled_slots",
    "single_rank",
    "torch_attention",
]


def make_scene(
    live: int, backend: str = OURS, device: str = "cpu", **shape: Any
) -> tuple[Scene, list[int]]:
    """A scene with `live` random rows at shuffled slots, all else NaN; and those slots."""
    made = Shape(**shape)
    scene = Scene(backend, made, device)
    slots = shuffled_slots(live, made)
    for layer in range(made.layers):
        scene.write(slots, make_rows(live, made, seed=100 + layer), layer)
    scene.poison(slots)
    return scene, slots


def check_run(
    scene: Scene, requests: list[Request], mode: str = "decode", seed: int = 0, **kwargs: Any
) -> torch.Tensor:
    """Run with fresh rows, compare with the oracle, return the output."""
    n = sum(r.q_len for r in requests) if mode == "extend" else len(requests)
    q = make_q(n, scene.shape, seed=seed)
    out = scene.run(requests, q, make_rows(n, scene.shape, seed=seed), mode, **kwargs)
    scene.check(f"{mode} {[len(r.slots) for r in requests]}", out, requests, q, mode=mode)
    return out
