"""Where a name decides: makes SGLang treat `flashinfer_mla_fp8` as it treats `flashinfer`.

`install` runs in every process that loads plugins, adds names to lists and wraps four functions;
it touches no GPU and imports no model code. `install_late` runs in the process that builds a
backend, where the modules that it extends are loaded already. Both may run any number of times.

Every entry below is a workaround for one fact: SGLang compares the *name* of an attention backend
with literals. Each says what breaks without it, why it is enough, and when it can go.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from . import BACKEND_NAME
from .checks import Check, failed
from .errors import IncompatibleEnvironment

logger = logging.getLogger(__name__)

STOCK_NAME = "flashinfer"
BACKEND_CLASS = "FlashInferMLAFp8Backend"

# the arguments that name an attention backend
DRAFT_FIELD = "speculative_draft_attention_backend"
FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    DRAFT_FIELD,
)
# the first and the last overridable step of SGLang's argument resolution
FIRST_STEP = "handle_deprecated_dp_attention"
LAST_STEP = "validate_deepep_v2_dispatch_token_budget"
# who declared a field, in SGLang's record of the resolution
_AS_STOCK = "sglang_fp8mla.as_stock"
_AS_OURS = "sglang_fp8mla.as_ours"

DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_DRAFT_TARGET = f"{DRAFT_FACTORY}._create_backend"

# (module, attribute) or (module, attribute, parameters that we pass or receive by these names).
# compat.py and the contract tests hold the installed SGLang against this table.
UPSTREAM_NAMES: tuple[tuple[Any, ...], ...] = (
    ("sglang.srt.plugins", "load_plugins"),
    ("sglang.srt.plugins", "GENERAL_PLUGINS_GROUP"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry._hooks"),
    ("sglang.srt.plugins.hook_registry", "_current_plugin_source"),
    ("sglang.srt.plugins.hook_registry", "HookType.AROUND"),
    ("sglang.srt.arg_groups.choices", "ATTENTION_BACKEND_CHOICES"),
    ("sglang.srt.arg_groups.choices", "add_attention_backend_choices"),
    ("sglang.srt.arg_groups.choices", "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS"),
    ("sglang.srt.arg_groups.choices", "add_chunked_prefix_cache_attention_backend"),
    ("sglang.srt.arg_groups.choices", "DRAFT_ATTENTION_BACKEND_CHOICES"),
    ("sglang.srt.arg_groups.choices", "add_draft_attention_backend_choices"),
    ("sglang.srt.arg_groups.resolution_hooks", "register_resolution_hook", ("name",)),
    ("sglang.srt.arg_groups.overrides", "declare_resolution", ("server_args", "source")),
    ("sglang.srt.arg_groups.overrides", "resolving_view", ("server_args",)),
    ("sglang.srt.arg_groups.overrides", "attention_backends_of", ("cfg",)),
    ("sglang.srt.arg_groups.overrides", "use_mla_backend", ("server_args",)),
    ("sglang.srt.arg_groups.kv_cache_hook", "TRANSLATED_MHA_RAILS"),
    ("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS"),
    ("sglang.srt.layers.attention.attention_registry", "register_attention_backend", ("name",)),
    ("sglang.srt.utils", "assert_pkg_version", ("pkg", "min_version", "message")),
    ("sglang.srt.utils", "get_bool_env_var", ("name",)),
    (
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory._create_backend",
        ("self", "backend_name", "backend_map", "error_template"),
    ),
    (
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory._create_flashinfer_decode_backend",
        ("self",),
    ),
    (
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory._create_flashinfer_prefill_backend",
        ("self",),
    ),
    (
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
    ),
    (
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "handle_attention_flashinfer",
        ("attn", "forward_batch"),
    ),
    ("sglang.srt.models.deepseek_common.utils", "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"),
)
# the same for what only some models or features use: the contract tests hold SGLang against these
# too, but a server that needs none of them is not refused for their sake
OPTIONAL_NAMES: tuple[tuple[Any, ...], ...] = (
    ("sglang.srt.models.sarvam_moe", "AttentionBackendRegistry.register", ("backend_name",)),
    ("sglang.srt.models.sarvam_moe", "_handle_separate_rope_backend"),
    ("sglang.srt.speculative.dflash_utils", "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS"),
    ("sglang.srt.mem_cache.kv_cache_configurator", "TRANSLATED_MHA_RAILS"),
)

# what could not be installed in this process: seam -> reason. Read by `check_seams`.
_failures: dict[str, str] = {}


def install() -> None:
    """Make the name valid and equal to `flashinfer` in every decision before a model is loaded.

    Repeatable: a second call changes nothing. A seam that this SGLang lacks is logged, remembered
    for `check_seams`, and does not keep the others out: the backend factory then refuses with the
    whole list, where the user sees it; an exception here would only be "invalid choice" to them.

    Raises:
        IncompatibleEnvironment: another package holds the name; nothing was changed.
    """
    require_name_free()
    for seam, step in _EARLY:
        _try(seam, step)


def install_late() -> None:
    """Extend the model-side tables. Called by the backend factory: the imports are heavy.

    Every reader looks its table up per forward pass, hence after any factory has run.

    Raises:
        IncompatibleEnvironment: a seam that decides what is computed is missing, early or late.
    """
    for seam, step in _LATE:
        _try(seam, step)
    bad = failed(check_seams())
    if bad:
        from .compat import refusal  # compat imports this module's tables

        raise refusal("install_late", bad)


def check_seams() -> list[Check]:
    """One Check per seam that could not be installed in this process; ok when there is none.

    "warn" for those that only cost time or memory, and for models that this process may not serve.
    """
    if not _failures:
        return [Check("sglang seams", "ok", "all installed")]
    return [
        Check(
            f"sglang seam: {seam}",
            "warn" if seam in _SPARE else "fail",
            reason,
            "use an SGLang version that docs/compat.md lists",
        )
        for seam, reason in _failures.items()
    ]


def name_owner() -> str | None:
    """The module whose factory holds our name in SGLang's registry; None when nobody does."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    factory = ATTENTION_BACKENDS.get(BACKEND_NAME)
    return None if factory is None else str(getattr(factory, "__module__", repr(factory)))


def require_name_free() -> None:
    """Raise when a package other than ours holds the name.

    Raises:
        IncompatibleEnvironment: it names the module, and the distribution where one is known.
    """
    try:
        owner = name_owner()
    except ImportError:  # this SGLang has no such registry: `install` reports that as a seam
        return
    if owner in (None, _factory().__module__):
        return
    raise IncompatibleEnvironment(
        f"register: attention backend {BACKEND_NAME!r} must be free, got one registered by "
        f"{_describe_module(owner)}; uninstall one of the two packages, or name the plugin to "
        f"load in SGLANG_PLUGINS"
    )


def _describe_module(module: str | None) -> str:
    """`module (distribution x)`, for a message."""
    from importlib.metadata import packages_distributions

    top = (module or "").partition(".")[0]
    distributions = packages_distributions().get(top, [])
    return f"{module} (distribution {', '.join(distributions)})" if distributions else str(module)


def _factory() -> Callable[[Any], Any]:
    from . import plugin  # plugin imports this module

    return plugin.create_backend


def _try(seam: str, step: Callable[[], None]) -> None:
    """Run one step; a missing upstream name is remembered, anything else is a bug and raises."""
    try:
        step()
    # ValueError: register_resolution_hook and HookRegistry refuse a target that they do not know
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        if seam not in _failures:
            logger.warning("%s: SGLang seam %s is not there: %s", BACKEND_NAME, seam, reason)
        _failures[seam] = reason
    else:
        _failures.pop(seam, None)


# --- names on lists ---------------------------------------------------------------------------


def _add_choice() -> None:
    """--attention-backend and its prefill and decode forms.

    Symptom: argparse says "invalid choice". Cause: a list of literals. Enough: the list is the
    argument's own, and this is its public adder. Remove: never, this is SGLang's extension point.
    """
    from sglang.srt.arg_groups import choices

    if BACKEND_NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([BACKEND_NAME])


def _add_chunked_prefix() -> None:
    """Chunked prefix cache.

    Symptom: silently off, so that every prefix hit becomes an absorbed prefill. Cause: the gate at
    model load reads a list of literals. Enough: its public adder. Remove: never, as above.
    """
    from sglang.srt.arg_groups import choices

    if BACKEND_NAME not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        choices.add_chunked_prefix_cache_attention_backend(BACKEND_NAME)


def _add_draft_choice() -> None:
    """Draft workers.

    Symptom: a draft that inherits our name gets another backend, with a warning at most. Cause: a
    list of literals. Enough: its public adder. Remove: never, as above.
    """
    from sglang.srt.arg_groups import choices

    if BACKEND_NAME not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([BACKEND_NAME])


def _register_factory() -> None:
    """The registry that turns a name into a backend.

    Symptom: ValueError after the weights are loaded. Cause: a dict of names. Enough: its public
    decorator. The module costs 0.1 s on top of what SGLang's own parsing loads, and no CUDA call.
    """
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    if ATTENTION_BACKENDS.get(BACKEND_NAME) is not _factory():
        register_attention_backend(BACKEND_NAME)(_factory())


# --- argument resolution ----------------------------------------------------------------------


def _wrap_resolution() -> None:
    """Every gate of the argument resolution judges us as `flashinfer`; the runtime sees our name.

    Symptom: multi-item scoring, unified memory, page-major layout, DCP, speculation and others
    reject the name, or skip a check. Cause: some fifteen comparisons with literals between the
    first and the last step. Enough: gates read fields through the record of declarations, so a
    declaration before the first step and one after the last cover all that lie between, for every
    field. Remove: when gates ask a backend for its abilities in place of its name.
    """
    from sglang.srt.arg_groups import resolution_hooks

    # the module has no way to ask what is registered, so a mark on it keeps a second call out
    if getattr(resolution_hooks, "_sglang_fp8mla_installed", False):
        return
    resolution_hooks.register_resolution_hook(FIRST_STEP)(_resolve_as_stock)
    resolution_hooks.register_resolution_hook(LAST_STEP)(_resolve_as_ours)
    resolution_hooks._sglang_fp8mla_installed = True


def _resolve_as_stock(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Before the first step: declare `flashinfer` for each field that holds our name."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    # for these SGLang leaves the resolution early, before our last step could restore the name
    if str(config.model_path).lower() not in ("none", "dummy"):
        ours = {name: STOCK_NAME for name in FIELDS if getattr(config, name) == BACKEND_NAME}
        if ours:
            declare_resolution(server_args, _AS_STOCK, **ours)
    previous(server_args)


def _resolve_as_ours(server_args: Any, previous: Callable[[Any], None]) -> None:
    """After the last step: declare our name wherever `flashinfer` still stands for it.

    A model without MLA keeps `flashinfer`: its backend is stock's whichever name it has, and the
    name is then stock's in the comparisons that SGLang makes for such models at run time.
    """
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        declare_resolution,
        resolving_view,
        use_mla_backend,
    )

    previous(server_args)
    asked = _asked_fields(server_args)
    if not asked:
        return
    if not use_mla_backend(server_args):
        logger.info("%s: the model has no MLA attention; flashinfer serves it", BACKEND_NAME)
        asked &= {DRAFT_FIELD}
    config = resolving_view(server_args)
    ours = {
        name: BACKEND_NAME
        for name in asked | _inherited_fields(asked)
        if getattr(config, name) == STOCK_NAME
        # a field that the user himself set to `flashinfer` stays stock's
        and (name in asked or getattr(server_args, name) is None)
    }
    if ours:
        # a plugin that loaded after us may have taken the name, unseen by `install`
        require_name_free()
        declare_resolution(server_args, _AS_OURS, **ours)
    if BACKEND_NAME in attention_backends_of(config):
        _require_flashinfer()


def _asked_fields(server_args: Any) -> frozenset[str]:
    """The fields that held our name when the resolution began."""
    for source, declared in getattr(server_args, "_resolved_overrides", None) or ():
        if source == _AS_STOCK:
            return frozenset(declared)
    return frozenset()


def _inherited_fields(asked: frozenset[str]) -> frozenset[str]:
    """Fields that SGLang fills from those in `asked` when the user left them out.

    A draft takes the prefill backend; prefill and decode take the common one; the common one is
    set when prefill and decode agree.
    """
    inherited: set[str] = set()
    if "attention_backend" in asked:
        inherited |= {"prefill_attention_backend", "decode_attention_backend"}
    if {"prefill_attention_backend", "decode_attention_backend"} <= asked:
        inherited.add("attention_backend")
    if "prefill_attention_backend" in asked | inherited:
        inherited.add(DRAFT_FIELD)
    return frozenset(inherited)


def _require_flashinfer() -> None:
    """Make the version check that SGLang makes at launch for `flashinfer`.

    Symptom: an old FlashInfer is found out by a traceback in the middle of start-up. Cause: the
    launcher compares names after the resolution, when ours is back. Enough: the same function with
    the version that SGLang's own metadata pins, which is the literal in the launcher in 0.5.22 and
    0.5.23. Remove: when the launcher's check covers registered backends.
    """
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from sglang.srt.utils import assert_pkg_version, get_bool_env_var

    if get_bool_env_var("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"):
        return
    for requirement in map(Requirement, requires("sglang") or ()):
        if requirement.name.replace("_", "-") == "flashinfer-python":
            for specifier in requirement.specifier:
                if specifier.operator in ("==", ">="):
                    assert_pkg_version(
                        "flashinfer_python",
                        specifier.version,
                        f"{BACKEND_NAME} needs the FlashInfer that this SGLang pins: "
                        f"pip install '{requirement}'",
                    )


# --- speculation ------------------------------------------------------------------------------


def _wrap_draft_factory() -> None:
    """EAGLE and NextN drafts on our backend.

    Symptom: "EAGLE is not supported in decode attention backend flashinfer_mla_fp8". Cause: the
    factory keeps its creators in local dicts. Enough: both dicts pass through one method, and an
    AROUND hook adds our creator beside stock's. Remove: when the factory takes registrations.
    """
    from sglang.srt.plugins import hook_registry

    registry = hook_registry.HookRegistry
    if any(_create_draft_backend in entry for entry in registry._hooks.get(_DRAFT_TARGET, ())):
        return
    registry.register(_DRAFT_TARGET, _create_draft_backend, hook_registry.HookType.AROUND)
    # load_plugins applies all hooks after its last plugin; by hand (a test, `doctor`) nobody does
    if hook_registry._current_plugin_source.get() is None:
        registry.apply_hooks()


def _create_draft_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`DraftBackendFactory._create_backend` with our creator in its map.

    The two maps share the method; which one this is shows in the creator that it has for stock.
    """
    stock = backend_map.get(STOCK_NAME)
    if stock is not None and stock == factory._create_flashinfer_decode_backend:
        backend_map = {**backend_map, BACKEND_NAME: lambda: _create_draft_decode(factory, stock)}
    elif stock is not None and stock == factory._create_flashinfer_prefill_backend:
        backend_map = {**backend_map, BACKEND_NAME: lambda: _create_draft_extend(factory, stock)}
    return original(factory, backend_name, backend_map, *args, **kwargs)


def _create_draft_decode(factory: Any, stock: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """One backend per draft step. A draft that is not MLA (EAGLE3) gets stock's."""
    runner = factory.draft_model_runner
    if not runner.use_mla_backend:
        return stock()
    from .backend import FlashInferMLAFp8MultiStepDraftBackend

    return BACKEND_NAME, FlashInferMLAFp8MultiStepDraftBackend(
        runner, factory.topk, factory.speculative_num_steps
    )


def _create_draft_extend(factory: Any, stock: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """The backend of the draft's extend after a verify. A draft that is not MLA gets stock's."""
    runner = factory.draft_model_runner
    if not runner.use_mla_backend:
        return stock()
    from .backend import FlashInferMLAFp8Backend

    return BACKEND_NAME, FlashInferMLAFp8Backend(runner, skip_prefill=False)


def _add_translated_rails() -> None:
    """A draft fused into the unified pool of an MLA hybrid (Kimi-Linear).

    Symptom: the draft keeps a pool of its own, with a log line at most. Cause: a frozenset of
    names, read when the pools are built, before any factory runs. Enough: its one reader at run
    time looks it up as a global of its module, which is loaded already in a scheduler process and
    copies the name when loaded later. The gates that share the set see `flashinfer`. Remove: when
    a backend states that it reads through the translator.
    """
    from sglang.srt.arg_groups import kv_cache_hook

    late: Any = sys.modules.get("sglang.srt.mem_cache.kv_cache_configurator")
    for module in (kv_cache_hook, late):
        if module is not None:
            module.TRANSLATED_MHA_RAILS |= frozenset({BACKEND_NAME})


def _know_dflash_class() -> None:
    """DFLASH verify.

    Symptom: a custom mask is built and planned on every step. Cause: a frozenset of class names.
    Enough: the only reader looks the global up on each call. Remove: when it asks the backend.
    """
    from sglang.srt.speculative import dflash_utils

    dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= frozenset({BACKEND_CLASS})


# --- models -----------------------------------------------------------------------------------


def _know_deepseek_handler() -> None:
    """DeepSeek's choice between MHA and absorbed MLA.

    Symptom: no error, but triton's prefill method. Cause: an unknown name gets triton's handler.
    Enough: the class takes registrations. Remove: never, unless unknown names become errors.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register(BACKEND_NAME, handlers.handle_attention_flashinfer)


def _know_absorbed_core() -> None:
    """The write and read path of absorbed MLA.

    Symptom: q and k are concatenated first and the row is written by another path; DCP asserts.
    Cause: a list of literals. Enough: readers hold the same list object. Remove: when the backend
    states how it takes its operands.
    """
    from sglang.srt.models.deepseek_common import utils

    if BACKEND_NAME not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(BACKEND_NAME)


def _know_sarvam_handler() -> None:
    """Sarvam's rope path.

    Symptom: the concatenated-rope path, which is not flashinfer's. Cause: an unknown name gets the
    default. Enough: the class takes registrations. A process that serves another model may not
    have the module, and then does not need it. Remove: as for DeepSeek's handler.
    """
    sarvam = sys.modules.get("sglang.srt.models.sarvam_moe")
    if sarvam is not None:
        sarvam.AttentionBackendRegistry.register(BACKEND_NAME, sarvam._handle_separate_rope_backend)


_EARLY: tuple[tuple[str, Callable[[], None]], ...] = (
    ("--attention-backend choices", _add_choice),
    ("chunked-prefix list", _add_chunked_prefix),
    ("draft list", _add_draft_choice),
    ("backend registry", _register_factory),
    ("argument resolution", _wrap_resolution),
    ("fused-draft rails", _add_translated_rails),
    ("draft factory", _wrap_draft_factory),
)
_LATE: tuple[tuple[str, Callable[[], None]], ...] = (
    ("DeepSeek handler", _know_deepseek_handler),
    ("absorbed-core list", _know_absorbed_core),
    ("Sarvam handler", _know_sarvam_handler),
    ("DFLASH class names", _know_dflash_class),
)
# without these a feature is slower or keeps a pool of its own; Sarvam has other ways to be served
_SPARE = frozenset({"fused-draft rails", "Sarvam handler", "DFLASH class names"})
# what each step is called in logs, checks, and the verdicts of the audit
SEAMS = tuple(seam for seam, _ in _EARLY + _LATE)
