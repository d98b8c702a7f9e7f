"""The attention backend: stock `flashinfer` for MLA, with the pool read in FP8 or cast row by row.

The parent builds every index and every wrapper. We stand between it and FlashInfer at two places:
`plan`, where a sink takes the parent's twelve arguments, gives the KV dtype its own value and keeps
what the batch references; and the two forwards, where one layer's pool is attended by the path of
the phase. A pool that is not FP8 leaves the parent alone. Imports SGLang and FlashInfer.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.attention import flashinfer_mla_backend as stock
from sglang.srt.layers.attention.attention_registry import create_flashinfer_backend
from sglang.srt.runtime_context import get_disagg, get_parallel

from . import compat, policy, probe
from .checks import Check
from .envs import Settings, read
from .kernels.gather_cast import POOL_DTYPES
from .kernels.mla_decode import MlaDecodePlan
from .metrics import StepCounters
from .probe import DECODE, EXTEND, Facts
from .workspace import LiveSlots, Workspace

logger = logging.getLogger(__name__)

# tokens; 16 splits of it cover 8192, longer requests get longer splits (MlaDecodePlan)
_INVARIANT_SPLIT = 512
_UNIT_SCALES = {"ckv_scale": 1.0, "kpe_scale": 1.0}
_logged: set[object] = set()


def _log_once(level: int, message: str, *args: object, each: bool = True) -> None:
    """Log a line once per process; with `each` unset, one line for all arguments."""
    key = (message, args) if each else message
    if key not in _logged:
        _logged.add(key)
        logger.log(level, message, *args)


def create(runner: Any, settings: Settings) -> Any:
    """The backend for `runner`: ours for MLA models, stock `flashinfer` for all others.

    Raises:
        IncompatibleEnvironment, InvalidArgument: as `FlashInferMLAFp8Backend`.
    """
    if not runner.use_mla_backend:
        _log_once(logging.INFO, "not an MLA model: stock flashinfer attends")
        return create_flashinfer_backend(runner)
    return FlashInferMLAFp8Backend(runner, settings=settings)


@dataclass(frozen=True)
class PoolLayout:
    """The geometry of the KV pool."""

    num_slots: int
    num_layers: int
    dim: int
    region: AbstractContextManager[object] | None

    @property
    def stock_bytes_per_step(self) -> int:
        """What stock moves to cast the pool: every row read in FP8 and written in 16 bits."""
        return self.num_layers * self.num_slots * self.dim * 3


def _mla_pool(runner: Any) -> Any:
    """The runner's MLA pool; hybrid models keep it beside the one of their linear layers."""
    return getattr(runner.token_to_kv_pool, "full_kv_pool", runner.token_to_kv_pool)


def check_pool(runner: Any) -> list[Check]:
    """What the model and its pool forbid, before anything is allocated."""
    config = runner.model_config
    pool = _mla_pool(runner)
    checks = []
    if getattr(pool, "use_dsa", False):
        checks.append(
            Check(
                "pool",
                "fail",
                "a sparse-attention (DSA) pool, whose rows no dense kernel reads",
                "serve the model with --attention-backend dsa, or densely, which is what it "
                f"computes up to index_topk tokens, by adding {compat.DENSE_OVERRIDE}",
            )
        )
        return checks
    rows = pool.get_key_buffer(pool.start_layer or 0)
    dim = config.kv_lora_rank + config.qk_rope_head_dim
    if rows.shape[-1] != dim:
        found = f"rows of {rows.shape[-1]} values, the model has {dim}"
        checks.append(Check("pool", "fail", found, "use --attention-backend flashinfer"))
    return checks


def pool_layout(runner: Any) -> PoolLayout:
    """The geometry of the runner's pool; `check_pool` has passed."""
    pool = _mla_pool(runner)
    rows = pool.get_key_buffer(pool.start_layer or 0)
    region = None
    saver = getattr(pool, "memory_saver_adapter", None)
    if saver is not None:
        # the tag of the pool itself: both leave the GPU while the engine sleeps
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        region = saver.region(GPU_MEMORY_TYPE_KV_CACHE)
    return PoolLayout(rows.shape[0], pool.layer_num, rows.shape[-1], region)


def facts_of(runner: Any, num_heads: int) -> Facts:
    """The plain values that the choice of a path may depend on."""
    device = torch.device(runner.device)
    on_gpu = device.type == "cuda"
    return Facts(
        device_name=torch.cuda.get_device_name() if on_gpu else device.type,
        capability=torch.cuda.get_device_capability() if on_gpu else (0, 0),
        num_heads=num_heads,
        ckv_dim=runner.model_config.kv_lora_rank,
        kpe_dim=runner.model_config.qk_rope_head_dim,
        q_dtype=str(runner.dtype).removeprefix("torch."),
        pool_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        flashinfer=compat.installed_version("flashinfer-python") or "",
    )


@dataclass
class Planned:
    """What one wrapper was last planned for; the tensors live on the device."""

    path: str
    bs: int
    kv_indptr: torch.Tensor  # [bs + 1] int32; address-stable under a CUDA graph
    # [>= kv_indptr[bs]] int32; address-stable under a CUDA graph; slots of the pool, or with
    # gather_cast places in the packed rows
    kv_indices: torch.Tensor
    num_heads: int  # planned, at least the layer's
    sm_scale: float


class PlanSink:
    """Stands in for FlashInfer's wrapper while the parent plans."""

    def __init__(
        self,
        backend: FlashInferMLAFp8Backend,
        wrapper: Any,
        phase: str,
        kv_indptr: torch.Tensor | None,
        tokens: int,
        *,
        in_place: bool = False,
    ) -> None:
        self._backend = backend
        self._wrapper = wrapper
        self._phase = phase
        self._kv_indptr = kv_indptr
        self._tokens = tokens
        self._in_place = in_place

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Keep the batch for the layers, and plan the wrapper with the dtype that it will read."""
        bs = len(kv_len_arr)
        if bs == 0:
            # an idle rank attends nothing, and FlashInfer refuses empty batches
            self._backend.note_empty(self._wrapper)
            return
        on_device = kv_indptr if self._kv_indptr is None else self._kv_indptr
        planned = self._backend.note_plan(
            self._wrapper,
            self._phase,
            bs,
            on_device,
            kv_indices,
            num_heads,
            sm_scale,
            self._tokens,
            in_place=self._in_place,
        )
        if planned.path == "fused":
            return  # our kernel has a plan of its own
        if planned.path == "native":
            kv_data_type = self._backend.pool_dtype
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            planned.kv_indices,
            kv_len_arr,
            num_heads,
            head_dim_ckv,
            head_dim_kpe,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
        )


class Fp8IndicesUpdaterDecode(stock.FlashInferMLAIndicesUpdaterDecode):
    """The parent's index building, planned through the sink."""

    def call_begin_forward(
        self,
        wrapper: Any,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        q_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        init_metadata_replay: bool = False,
        spec_info: Any = None,
        **kwargs: Any,
    ) -> None:
        # on replay plan() gets host copies; these are the device lengths that it stands for
        lens = kv_indptr if spec_info is None else spec_info.kv_indptr
        if init_metadata_replay and spec_info is not None:
            kwargs = _with_draft_tokens(kwargs, self.attn_backend.draft_tokens)
        lens = lens[: len(paged_kernel_lens) + 1]
        sink = PlanSink(
            self.attn_backend,
            wrapper,
            DECODE,
            lens,
            paged_kernel_lens_sum,
            # then the indices are the very buffer that the captured kernel reads
            in_place=init_metadata_replay,
        )
        super().call_begin_forward(
            sink,
            paged_kernel_lens,
            paged_kernel_lens_sum,
            q_indptr,
            kv_indptr,
            init_metadata_replay,
            spec_info,
            **kwargs,
        )


def _with_draft_tokens(plan_kwargs: dict[str, Any], draft_tokens: int) -> dict[str, Any]:
    """The host lengths of a draft step's replay, its draft tokens counted.

    Symptom: draft steps attend to shifted rows and to none of their own draft tokens, which costs
    acceptance. Cause: sglang 0.5.22 and 0.5.23 hand the fast plan of a replay the lengths of the
    prefix (FlashInferMLAAttnBackend._apply_cuda_graph_metadata), while the indices hold one more
    token per step; eagerly they plan the prefix alone (`init_forward_metadata` below). Enough:
    a draft step has no other plan. Remove when upstream's lengths equal its kv_indptr.
    """
    lens = plan_kwargs["kv_len_arr_cpu"] + draft_tokens
    starts = plan_kwargs["kv_indptr_cpu"]
    shift = torch.arange(len(starts), dtype=starts.dtype) * draft_tokens
    return {**plan_kwargs, "kv_len_arr_cpu": lens, "kv_indptr_cpu": starts + shift}


class Fp8IndicesUpdaterPrefill(stock.FlashInferMLAIndicesUpdaterPrefill):
    """The parent's index building, planned through the sink."""

    num_local_heads: int

    def __init__(self, model_runner: Any, attn_backend: FlashInferMLAFp8Backend) -> None:
        super().__init__(model_runner, attn_backend)
        self._layer_heads = self.num_local_heads

    def call_begin_forward(
        self,
        wrapper_ragged: Any,
        wrapper_paged: Any,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        seq_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        kv_indptr: torch.Tensor,
        qo_indptr: torch.Tensor,
        use_ragged: bool,
        spec_info: Any = None,
        attn_dcp_metadata: Any = None,
        fast_verify_plan_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # ragged prefill and a gathered DCP buffer stay the parent's, which casts what it reads
        reads_pool = not use_ragged and not _is_gathered(attn_dcp_metadata)
        fast = fast_verify_plan_kwargs
        # the parent plans with this attribute; its causal plans may need padded heads
        heads = probe.plan_heads(self._layer_heads) if reads_pool else self._layer_heads
        self.num_local_heads = heads
        sink = PlanSink(self.attn_backend, wrapper_paged, EXTEND, None, paged_kernel_lens_sum)
        super().call_begin_forward(
            wrapper_ragged,
            # DFLASH's fast plan writes to the wrapper itself and calls no plan()
            sink if reads_pool and fast is None else wrapper_paged,
            req_pool_indices,
            paged_kernel_lens,
            paged_kernel_lens_sum,
            seq_lens,
            prefix_lens,
            kv_indptr,
            qo_indptr,
            use_ragged,
            spec_info,
            attn_dcp_metadata,
            fast,
            **kwargs,
        )
        if fast is not None:
            self.attn_backend.note_plan(
                wrapper_paged,
                EXTEND,
                len(seq_lens),
                fast["kv_indptr_cpu"],
                fast["kv_indices_buf"],
                heads,
                self.scaling,
                paged_kernel_lens_sum,
                in_place=True,
            )


def _is_gathered(attn_dcp_metadata: Any) -> bool:
    """Whether DCP gathered the keys of this extend into a buffer of their own."""
    return getattr(attn_dcp_metadata, "dcp_kv_buffer", None) is not None


class FlashInferMLAFp8Backend(stock.FlashInferMLAAttnBackend):
    """FlashInfer MLA attention over an FP8 pool that is never cast whole.

    Args:
        model_runner: SGLang's ModelRunner, its KV pool built.
        skip_prefill: decode only (the steps of a multi-step draft).
        kv_indptr_buf, q_indptr_decode_buf: as the parent takes them.
        settings: the environment, read again when None.
        draft_tokens: tokens that a step of a multi-step draft attends to beyond the prefix.

    Raises:
        IncompatibleEnvironment: the pool, the GPU or a forced path does not fit, or the workspace
            has no room; the message says what helps.
        InvalidArgument: an environment variable of the package or the profile is bad.
    """

    def __init__(
        self,
        model_runner: Any,
        skip_prefill: bool = False,
        kv_indptr_buf: torch.Tensor | None = None,
        q_indptr_decode_buf: torch.Tensor | None = None,
        *,
        settings: Settings | None = None,
        draft_tokens: int = 0,
    ) -> None:
        settings = settings or read()
        self.pool_dtype: torch.dtype = model_runner.kv_cache_dtype
        self._planned: WeakKeyDictionary[Any, Planned] = WeakKeyDictionary()
        active = self.pool_dtype in POOL_DTYPES
        self.draft_tokens = draft_tokens if active else 0
        if active:
            bad = check_pool(model_runner)
            if bad:
                raise compat.refusal("create_backend", bad)
        super().__init__(model_runner, skip_prefill, kv_indptr_buf, q_indptr_decode_buf)
        if not active:
            _log_once(
                logging.INFO,
                "the KV pool is %s: nothing to cast, stock flashinfer attends",
                self.pool_dtype,
            )
            return

        self.indices_updater_decode = Fp8IndicesUpdaterDecode(model_runner, self)
        if not skip_prefill:
            self.indices_updater_prefill = Fp8IndicesUpdaterPrefill(model_runner, self)
        layout = pool_layout(model_runner)
        device = torch.device(self.device)
        facts = facts_of(model_runner, self.indices_updater_decode.num_local_heads)
        self.decision, _ = policy.choose(
            facts,
            settings,
            lambda path, phase: probe.run_probe(path, phase, facts, str(device)),
        )
        self._live: LiveSlots | None = None
        self._workspace: Workspace | None = None
        self._fused: MlaDecodePlan | None = None
        phases = (
            [self.decision.decode] if skip_prefill else [self.decision.decode, self.decision.extend]
        )
        if any("gather_cast" in choice.paths for choice in phases):
            self._live = LiveSlots(layout.num_slots, device)
            self._workspace = Workspace.get(
                layout.num_slots,
                layout.dim,
                model_runner.dtype,
                device,
                # pdmux runs prefill and decode on streams of their own
                exclusive=get_disagg().enable_pdmux,
                region=layout.region,
            )
        if "fused" in self.decision.decode.paths:
            self._fused = MlaDecodePlan(
                max_bs=self.kv_indptr.numel() - 1,
                num_heads=facts.num_heads,
                device=device,
                kpe_dim=facts.kpe_dim,
                q_dtype=model_runner.dtype,
                pool_dtype=self.pool_dtype,
                split_len=_INVARIANT_SPLIT if settings.batch_invariant else None,
            )
        self._counters: StepCounters | None = None
        server_args = getattr(model_runner, "server_args", None)
        if (
            getattr(server_args, "enable_metrics", False)
            and getattr(model_runner, "tp_rank", 0) == 0
        ):
            self._counters = StepCounters(layout.num_layers * layout.dim)
        # host lengths of a fast plan are copied here; one more entry than any batch
        self._kv_indptr_staging = torch.empty_like(self.kv_indptr)
        workspace_bytes = 0 if self._workspace is None else self._workspace.rows.nbytes
        workspace_bytes += 0 if self._fused is None else self._fused.workspace_bytes
        for choice in phases:
            _log_once(
                logging.INFO,
                "%s path: %s, because %s; workspace %.2f GiB; stock would move %.1f GiB a step",
                choice.phase,
                choice,
                choice.reason,
                workspace_bytes / 2**30,
                layout.stock_bytes_per_step / 2**30,
            )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager metadata, the parent's but for a draft step, which plans its draft tokens too."""
        if not (self.draft_tokens and forward_batch.forward_mode.is_decode_or_idle()):
            super().init_forward_metadata(forward_batch)
            return
        # `_with_draft_tokens` says why; the parent leaves out `spec_info`, which holds the indices
        self.indices_updater_decode.update(
            forward_batch.seq_lens,
            forward_batch.seq_lens_sum,
            decode_wrapper=self.decode_wrapper,
            init_metadata_replay=False,
            spec_info=forward_batch.spec_info,
            req_pool_indices=forward_batch.req_pool_indices,
            plan=forward_batch.kv_loc_plan,
        )
        self.forward_metadata = stock.DecodeMetadata(self.decode_wrapper)

    def note_empty(self, wrapper: Any) -> None:
        """The batch that `wrapper` was planned for has no requests."""
        none = self._kv_indptr_staging[:0]
        self._planned[wrapper] = Planned("none", 0, none, none, 0, 0.0)

    def note_plan(
        self,
        wrapper: Any,
        phase: str,
        bs: int,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        num_heads: int,
        sm_scale: float,
        tokens: int,
        *,
        in_place: bool = False,
    ) -> Planned:
        """Prepare one step for all layers: choose the path, list the live slots.

        Args:
            wrapper: the FlashInfer wrapper that the layers will run.
            phase: `decode` or `extend`.
            bs: requests, padded ones included.
            kv_indptr: [bs + 1] int32. Under a CUDA graph its storage is what replays read; a host
                copy is copied to the device, in order of the current stream.
            kv_indices: [>= kv_indptr[bs]] int32, slots.
            num_heads: heads that the wrapper is planned for.
            sm_scale: the softmax scale that the parent plans with.
            tokens: KV tokens of the batch as the host knows them; no result depends on it.
            in_place: gather_cast renumbers `kv_indices` itself, not a copy.
        """
        if kv_indptr.device != kv_indices.device:
            staged = self._kv_indptr_staging[: bs + 1]
            kv_indptr = staged.copy_(kv_indptr[: bs + 1], non_blocking=True)
        choice = self.decision.decode if phase == DECODE else self.decision.extend
        planned = Planned(choice.path(bs), bs, kv_indptr, kv_indices, num_heads, sm_scale)
        self._planned[wrapper] = planned
        if planned.path == "gather_cast":
            assert self._live is not None
            planned.kv_indices = self._live.update(
                kv_indices, kv_indptr, bs, tokens, q_rows=num_heads, in_place=in_place
            )
        elif planned.path == "fused":
            assert self._fused is not None
            self._fused.plan(kv_indptr, bs)
        if self._counters is not None:
            self._counters.count(phase, planned.path, tokens)
        return planned

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> Any:
        """One decode layer; arguments and result as the parent's."""
        wrapper = self.forward_metadata.decode_wrapper
        planned = self._planned.get(wrapper)
        if planned is None:
            return super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope
            )
        if save_kv_cache and k is not None:
            self._write_rows(k, v, k_rope, layer, forward_batch)
        # under DCP each rank holds part of the keys, and the ranks merge by base-2 LSE
        return_lse = forward_batch.forward_mode.is_decode() and get_parallel().dcp_enabled
        return self._attend(wrapper, planned, q, q_rope, layer, return_lse)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> Any:
        """One extend layer; arguments and result as the parent's."""
        # in all of these the parent reads live rows only: prefix chunks by MHA, ragged prefill, and
        # a DCP buffer that holds the gathered keys
        by_mha = forward_batch.attn_attend_prefix_cache is not None and any(
            forward_batch.extend_prefix_lens_cpu
        )
        planned = None
        if not (
            by_mha
            or _is_gathered(forward_batch.attn_dcp_metadata)
            or self.forward_metadata.use_ragged
        ):
            planned = self._planned.get(self.forward_metadata.prefill_wrapper)
        if planned is None:
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope
            )
        if save_kv_cache and k is not None:
            self._write_rows(k, v, k_rope, layer, forward_batch)
        wrapper = self.forward_metadata.prefill_wrapper
        return self._attend(wrapper, planned, q, q_rope, layer, return_lse=False)

    def _write_rows(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rope: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
    ) -> None:
        """Write the batch's new rows, by the pool's own doors, which quantise at scale 1."""
        where = stock.KVWriteLoc.for_batch(forward_batch)
        # Symptom: in a batch, the steps of a multi-step draft attend to rows that nobody wrote.
        # Cause: sglang 0.5.22 and 0.5.23 give each step a strided view of out_cache_loc
        # (per_step_draft_out_cache_loc), and their CUDA write kernel (set_mla_kv_buffer.cuh) reads
        # the ids as if they were contiguous. Enough: all other ids are, and are not copied.
        # Remove when that kernel asks for a stride of 1.
        where.loc = where.loc.contiguous()
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)

    # --enable-torch-compile: dynamo would trace into the launches, of which it does not know every
    # option (Triton's launch_pdl), and has nothing to fuse there
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(
        self,
        wrapper: Any,
        planned: Planned,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layer: Any,
        return_lse: bool,
    ) -> Any:
        """Attend one layer's pool; the rows of this step are written.

        Returns:
            [num_tokens, num_heads * ckv] in q's dtype; with `return_lse` also the base-2 LSE,
            [num_tokens, num_heads] float32.
        """
        heads, ckv = layer.tp_q_head_num, layer.v_head_dim
        if planned.bs == 0:
            return q.new_zeros(q.shape[0], heads * ckv)
        if q_rope is None:
            q = q.view(-1, heads, layer.head_dim)
            q_nope, q_pe = q[..., :ckv], q[..., ckv:]
        else:
            q_nope = q.view(-1, heads, ckv)
            q_pe = q_rope.view(-1, heads, layer.head_dim - ckv)
        if layer.k_scale_float not in (None, 1.0):
            _log_once(
                logging.WARNING,
                "the checkpoint's k_scale (layer %d: %s) is ignored: SGLang writes and reads MLA "
                "rows at scale 1, as stock flashinfer does",
                layer.layer_id,
                layer.k_scale_float,
                each=False,
            )
        # get_key_buffer waits for HiCache's transfer of this layer
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(self.pool_dtype)
        if planned.path == "fused":
            return self._attend_fused(planned, q_nope, q_pe, rows, return_lse)
        scales = _UNIT_SCALES
        if planned.path == "gather_cast":
            assert self._workspace is not None
            assert self._live is not None
            rows, scales = self._workspace.fill(rows, self._live), {}
        if planned.num_heads != heads:
            q_nope = probe.pad_heads(q_nope, planned.num_heads)
            q_pe = probe.pad_heads(q_pe, planned.num_heads)
        # not empty_like, which would keep the strides of a view into [ckv | kpe] rows
        out = q_nope.new_empty(q_nope.shape)
        result = wrapper.run(
            q_nope,
            q_pe,
            rows[..., :ckv],
            rows[..., ckv:],
            out=out,
            return_lse=return_lse,
            **scales,
        )
        out, lse_log2 = result if return_lse else (result, None)
        if planned.num_heads != heads:
            out = out[:, :heads]
        out = out.reshape(-1, heads * ckv)
        return (out, lse_log2) if return_lse else out

    def _attend_fused(
        self,
        planned: Planned,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        rows: torch.Tensor,
        return_lse: bool,
    ) -> Any:
        """One layer by our own decode kernel; result as `_attend`."""
        assert self._fused is not None
        out = q_nope.new_empty(q_nope.shape)
        lse_log2 = None
        if return_lse:
            lse_log2 = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
        self._fused.run(
            q_nope,
            q_pe if q_pe.shape[-1] else None,
            rows,
            planned.kv_indices,
            planned.kv_indptr,
            out,
            sm_scale=planned.sm_scale,
            lse_log2=lse_log2,
        )
        out = out.view(out.shape[0], -1)
        return (out, lse_log2) if return_lse else out


class FlashInferMLAFp8MultiStepDraftBackend(stock.FlashInferMLAMultiStepDraftBackend):
    """The parent's multi-step draft with our backends as its steps; theirs would cast the pool."""

    attn_backends: list[Any]

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        super().__init__(model_runner, topk, speculative_num_steps)
        self.attn_backends = [
            FlashInferMLAFp8Backend(
                model_runner,
                skip_prefill=True,
                kv_indptr_buf=self.kv_indptr[step],
                q_indptr_decode_buf=self.q_indptr_decode,
                draft_tokens=step + 1,
            )
            for step in range(len(self.attn_backends))
        ]
        self.attn_backend_list = self.attn_backends
