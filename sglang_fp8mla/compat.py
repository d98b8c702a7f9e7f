"""Every upstream name that the backend relies on, with one check per name.

The factory, `doctor` and the contract tests run the same checks. Versions gate first, then the
names and parameters themselves: distributions backport, and nightlies lie.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .checks import Check, failed
from .errors import IncompatibleEnvironment

SGLANG_SUPPORTED = SpecifierSet(">=0.5.22,<0.6", prereleases=True)
# sglang 0.5.22 pins flashinfer 0.7.1, 0.5.23 pins 0.7.2; the FP8 plan of `native` came with 0.6.14,
# and 0.7.1 is the first that refuses a causal plan which would drop a key
FLASHINFER_SUPPORTED = SpecifierSet(">=0.7.1,<0.8", prereleases=True)
TESTED_PAIR = "sglang==0.5.23 flashinfer-python==0.7.2"

# GLM-5 and DeepSeek-V3.2 keep 656-byte rows that no dense kernel reads
DENSE_OVERRIDE = """--json-model-override-args '{"architectures": ["DeepseekV2ForCausalLM"]}'"""


@dataclass(frozen=True)
class UpstreamName:
    """`module`.`attribute`, and the parameters of it that we pass or override."""

    module: str
    attribute: str
    parameters: tuple[str, ...] = ()
    why: str = ""


_FORWARD = (
    "self",
    "q",
    "k",
    "v",
    "layer",
    "forward_batch",
    "save_kv_cache",
    "q_rope",
    "k_rope",
)
_MLA = "sglang.srt.layers.attention.flashinfer_mla_backend"

BACKEND_NAMES = (
    UpstreamName(
        _MLA,
        "FlashInferMLAAttnBackend.__init__",
        ("self", "model_runner", "skip_prefill", "kv_indptr_buf", "q_indptr_decode_buf"),
        "the parent class",
    ),
    UpstreamName(_MLA, "FlashInferMLAAttnBackend.forward_decode", _FORWARD, "overridden"),
    UpstreamName(_MLA, "FlashInferMLAAttnBackend.forward_extend", _FORWARD, "overridden"),
    UpstreamName(
        _MLA,
        "FlashInferMLAIndicesUpdaterDecode.call_begin_forward",
        (
            "self",
            "wrapper",
            "paged_kernel_lens",
            "paged_kernel_lens_sum",
            "q_indptr",
            "kv_indptr",
            "init_metadata_replay",
            "spec_info",
        ),
        "overridden: plans go through our sink",
    ),
    UpstreamName(
        _MLA,
        "FlashInferMLAIndicesUpdaterPrefill.call_begin_forward",
        (
            "self",
            "wrapper_ragged",
            "wrapper_paged",
            "req_pool_indices",
            "paged_kernel_lens",
            "paged_kernel_lens_sum",
            "seq_lens",
            "prefix_lens",
            "kv_indptr",
            "qo_indptr",
            "use_ragged",
            "spec_info",
            "attn_dcp_metadata",
            "fast_verify_plan_kwargs",
        ),
        "overridden: plans go through our sink",
    ),
    UpstreamName(
        _MLA,
        "FlashInferMLAMultiStepDraftBackend.__init__",
        ("self", "model_runner", "topk", "speculative_num_steps"),
        "its children are replaced by ours",
    ),
    UpstreamName(
        _MLA,
        "FlashInferMLAIndicesUpdaterDecode.update",
        ("self", "seq_lens", "seq_lens_sum", "decode_wrapper", "init_metadata_replay", "spec_info"),
        "called for eager draft steps",
    ),
    UpstreamName(_MLA, "FlashInferMLAAttnBackend.init_forward_metadata", ("self", "forward_batch")),
    UpstreamName(_MLA, "DecodeMetadata", ("decode_wrapper",), "set for eager draft steps"),
    UpstreamName(_MLA, "KVWriteLoc.for_batch", (), "where the new row is written"),
    UpstreamName(
        "sglang.srt.layers.attention.attention_registry",
        "create_flashinfer_backend",
        ("runner",),
        "what runners without FP8 MLA rows get",
    ),
    UpstreamName(
        "sglang.srt.runtime_context", "get_parallel", (), "whether decode returns its LSE (DCP)"
    ),
    UpstreamName("sglang.srt.runtime_context", "get_disagg", (), "concurrent streams (pdmux)"),
)

FLASHINFER_NAMES = (
    UpstreamName(
        "flashinfer",
        "BatchMLAPagedAttentionWrapper.plan",
        (
            "qo_indptr",
            "kv_indptr",
            "kv_indices",
            "kv_len_arr",
            "num_heads",
            "head_dim_ckv",
            "head_dim_kpe",
            "page_size",
            "causal",
            "sm_scale",
            "q_data_type",
            "kv_data_type",
        ),
        "twelve positionals, a KV dtype of its own among them",
    ),
    UpstreamName(
        "flashinfer",
        "BatchMLAPagedAttentionWrapper.run",
        (
            "q_nope",
            "q_pe",
            "ckv_cache",
            "kpe_cache",
            "out",
            "return_lse",
            "ckv_scale",
            "kpe_scale",
        ),
        "an FP8 plan needs both scales",
    ),
)


def upstream_names() -> tuple[UpstreamName, ...]:
    """All names of the package: the backend's, FlashInfer's, and those of `integration`."""
    from .integration import UPSTREAM_NAMES

    seams = tuple(UpstreamName(*entry) for entry in UPSTREAM_NAMES)
    return BACKEND_NAMES + FLASHINFER_NAMES + seams


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_version(distribution: str, supported: SpecifierSet) -> Check:
    """One check: is `distribution` installed, in a version of `supported`?"""
    found = installed_version(distribution)
    fix = f"pip install {TESTED_PAIR}"
    if found is None:
        return Check(distribution, "fail", "not installed", fix)
    try:
        version = Version(found)
    except InvalidVersion:
        return Check(distribution, "warn", f"{found} (not a version; names decide)", fix)
    if version in supported:
        return Check(distribution, "ok", found)
    return Check(distribution, "fail", f"{found}, supported is {supported}", fix)


def check_name(name: UpstreamName) -> Check:
    """One check: does `name` exist, with the parameters that we pass?"""
    label = f"{name.module}.{name.attribute}"
    fix = f"pip install {TESTED_PAIR}"
    try:
        found: object = importlib.import_module(name.module)
        for part in name.attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        return Check(label, "fail", f"its module does not import: {error}", fix)
    except AttributeError:
        return Check(label, "fail", "gone or renamed", fix)
    if not name.parameters:
        return Check(label, "ok", "found")
    if not callable(found):
        return Check(label, "fail", f"not callable but {type(found).__name__}", fix)
    has = set(inspect.signature(found).parameters)
    lacking = [parameter for parameter in name.parameters if parameter not in has]
    if lacking:
        return Check(label, "fail", f"takes no {', '.join(lacking)}", fix)
    return Check(label, "ok", "found")


def check_versions() -> list[Check]:
    """The version checks alone; they import neither package."""
    return [
        check_version("sglang", SGLANG_SUPPORTED),
        check_version("flashinfer-python", FLASHINFER_SUPPORTED),
    ]


def check_environment() -> list[Check]:
    """Versions first; when they pass, every upstream name. Imports SGLang and FlashInfer then."""
    checks = check_versions()
    if not failed(checks):
        checks += [check_name(name) for name in upstream_names()]
    return checks


def refusal(where: str, checks: list[Check]) -> IncompatibleEnvironment:
    """The one error that lists every failed check of `checks` with its remedy."""
    lines = "\n".join(f"  - {check}" for check in checks)
    return IncompatibleEnvironment(
        f"{where}: flashinfer_mla_fp8 cannot run here:\n{lines}\n"
        "`sglang-fp8mla doctor` shows every check; `--attention-backend flashinfer` runs without us"
    )


def require_environment() -> None:
    """Raise unless every check of `check_environment` passes.

    Raises:
        IncompatibleEnvironment: lists all failed checks, each with its remedy.
    """
    bad = failed(check_environment())
    if bad:
        raise refusal("create_backend", bad)
