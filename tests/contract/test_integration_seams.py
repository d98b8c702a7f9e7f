"""The seams one by one, on real SGLang: what `install` and `install_late` change, and refuse.

Each test runs in a process of its own, because SGLang's registries live as long as the process.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.forks import Forks
from contract.sglang_wheels import (
    SGLANG_0522,
    IndexUnreachable,
    fetch_sglang,
    install_plugin,
    make_distribution,
)
from contract.test_audit import installed_package
from contract.test_integration import COMMON, MODELS

from sglang_fp8mla.integration import FIRST_STEP, LAST_STEP

pytestmark = pytest.mark.sglang

VERSIONS = pytest.mark.parametrize("version", ["installed", SGLANG_0522])


@pytest.fixture
def plugin_path(tmp_path: Path) -> str:
    return install_plugin(tmp_path / "site")


def sglang_package(version: str) -> Path:
    if version == "installed":
        return installed_package()
    try:
        return fetch_sglang(version)
    except IndexUnreachable as error:
        pytest.skip(f"sglang {version} cannot be downloaded: {error}")


def python(
    *arguments: str, path: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=os.sep,  # the checkout as the current directory would count as installed
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **(env or {})},
    )


_servers: dict[str, Forks] = {}


@pytest.fixture(scope="module", autouse=True)
def _close_servers() -> Iterator[None]:
    yield
    while _servers:
        _servers.popitem()[1].close()


def run_code(code: str, path: str, version: str = "installed") -> str:
    """Run a snippet in a fork with one SGLang; returns stdout and stderr."""
    if version not in _servers:
        front = [] if version == "installed" else [str(sglang_package(version).parent)]
        _servers[version] = Forks(front)
    return _servers[version].run(textwrap.dedent(code), path)


def test_import_is_light(plugin_path: str) -> None:
    """SGLang loads the plugin in every process: importing it must load nothing of weight."""
    code = """
import sys
import sglang_fp8mla.plugin, sglang_fp8mla.integration
print({"torch", "triton", "sglang", "flashinfer", "numpy", "rich"} & set(sys.modules))
"""
    done = python("-c", code, path=plugin_path)
    assert done.stdout.strip() == "set()", done.stderr


@VERSIONS
def test_register_is_light(plugin_path: str, version: str) -> None:
    """On top of what SGLang's own parsing loads: configuration modules, and no CUDA call."""
    run_code(
        """
        import sys
        import sglang.srt.plugins, sglang.srt.server_args, torch
        def forbidden(*args, **kwargs):
            raise AssertionError("register touched CUDA")
        torch.cuda._lazy_init = torch._C._cuda_getDeviceCount = forbidden
        before = set(sys.modules)
        from sglang_fp8mla.plugin import register
        register()
        new = {name for name in sys.modules if name not in before}
        heavy = ("torch.", "triton", "flashinfer", "sglang.srt.models", "sglang.srt.managers",
                 "sglang.srt.mem_cache", "sglang.kernels", "sgl_kernel")
        assert not [name for name in new if name.startswith(heavy)], sorted(new)
        assert not torch.cuda.is_initialized()
        """,
        plugin_path,
        version,
    )


@VERSIONS
def test_registers_once_however_often(plugin_path: str, version: str) -> None:
    """register() twice, through load_plugins and by hand: one entry in every list."""
    run_code(
        """
        from collections import Counter
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang_fp8mla import BACKEND_NAME as NAME, integration, plugin
        plugin.register(); plugin.register(); integration.install_late(); integration.install_late()
        from sglang.srt.arg_groups import choices, kv_cache_hook, resolution_hooks
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.mem_cache import kv_cache_configurator
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers, utils
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.speculative import dflash_utils, draft_utils
        for names in (
            choices.ATTENTION_BACKEND_CHOICES,
            choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
            choices.DRAFT_ATTENTION_BACKEND_CHOICES,
            utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS,
        ):
            assert Counter(names)[NAME] == 1, names
        assert NAME not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
        assert ATTENTION_BACKENDS[NAME] is plugin.create_backend
        for step in (integration.FIRST_STEP, integration.LAST_STEP):
            assert len(resolution_hooks._HOOKS[step]) == 1
        registry = handlers.AttentionBackendRegistry
        assert registry.get_handler(NAME) is handlers.handle_attention_flashinfer
        assert NAME in kv_cache_hook.TRANSLATED_MHA_RAILS
        assert NAME in kv_cache_configurator.TRANSLATED_MHA_RAILS
        target = integration._DRAFT_TARGET
        assert len(HookRegistry._hooks[target]) == 1 and target in HookRegistry._patched
        assert draft_utils.DraftBackendFactory._create_backend.__wrapped__
        assert integration.check_seams()[0].level == "ok"
        """,
        plugin_path,
        version,
    )


def test_registering_by_hand_wraps_the_draft_factory_at_once(plugin_path: str) -> None:
    """Without load_plugins, whose last act is to apply the hooks: SGLang's kit, a notebook."""
    run_code(
        """
        from sglang_fp8mla.plugin import register
        register()
        from sglang.srt.speculative.draft_utils import DraftBackendFactory
        wrapped = DraftBackendFactory._create_backend.__wrapped__
        register()
        assert DraftBackendFactory._create_backend.__wrapped__ is wrapped
        assert not hasattr(wrapped, "__wrapped__")
        """,
        plugin_path,
    )


def test_rails_are_extended_where_they_were_copied_first(plugin_path: str) -> None:
    """A scheduler process has imported the configurator before it loads plugins."""
    run_code(
        """
        from sglang.srt.mem_cache import kv_cache_configurator
        from sglang.srt.plugins import load_plugins
        load_plugins()
        assert "flashinfer_mla_fp8" in kv_cache_configurator.TRANSLATED_MHA_RAILS
        """,
        plugin_path,
    )


@VERSIONS
def test_models_take_stocks_way(plugin_path: str, version: str) -> None:
    """Sarvam's rope path and DFLASH's verify policy, through their own readers."""
    run_code(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.models import sarvam_moe
        from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
        from sglang_fp8mla import BACKEND_NAME, integration
        from sglang_fp8mla.backend import FlashInferMLAFp8Backend
        registry = sarvam_moe.AttentionBackendRegistry
        ours = lambda: registry.get_forward_method(BACKEND_NAME, None, None)
        bare = FlashInferMLAFp8Backend.__new__(FlashInferMLAFp8Backend)
        policy = ("FlashInferMLAFp8Backend", True)
        assert ours() != registry.get_forward_method("flashinfer", None, None)
        assert resolve_dflash_verify_mask_policy(bare) == policy
        integration.install_late()
        assert ours() == registry.get_forward_method("flashinfer", None, None)
        assert resolve_dflash_verify_mask_policy(bare) == ("FlashInferMLAFp8Backend", False)
        """,
        plugin_path,
        version,
    )


@VERSIONS
def test_draft_factory_builds_our_classes(plugin_path: str, version: str) -> None:
    """SGLang's own factory, both of its maps: ours for MLA drafts, stock's for others.

    Our name may come from the draft's own argument or from the target's pair; the stamp on the
    backend and on each step's child is what the model's dispatch reads.
    """
    run_code(
        """
        from types import SimpleNamespace as Namespace
        from sglang.srt.plugins import load_plugins
        load_plugins()
        import sglang.srt.layers.attention.flashinfer_backend as mha
        import sglang.srt.layers.attention.flashinfer_mla_backend as mla
        from sglang.srt.speculative import draft_utils
        from sglang_fp8mla import BACKEND_NAME as NAME, backend

        def recorder(label):
            def build(runner, *args, **kwargs):
                step = lambda: Namespace()
                return Namespace(label=label, args=args, kwargs=kwargs, attn_backends=[step()] * 2)
            return build

        backend.FlashInferMLAFp8Backend = recorder("ours")
        backend.FlashInferMLAFp8MultiStepDraftBackend = recorder("ours, steps")
        mla.FlashInferMLAAttnBackend = recorder("stock")
        mla.FlashInferMLAMultiStepDraftBackend = recorder("stock, steps")
        mha.FlashInferAttnBackend = recorder("MHA")
        mha.FlashInferMultiStepDraftBackend = recorder("MHA, steps")
        mode = Namespace(speculative_attention_mode="prefill")
        draft_utils.get_spec = lambda: mode

        def build(kind, own, pair, is_mla):
            draft_utils.attention_backends = lambda: pair
            config = Namespace(hf_config=None, hf_text_config=None)
            runner = Namespace(
                draft_attention_backend=own, use_mla_backend=is_mla, model_config=config
            )
            factory = draft_utils.DraftBackendFactory(runner, 2, 3)
            return getattr(factory, kind)()

        decode, extend = "create_decode_backend", "create_draft_extend_backend"
        for own, pair in ((NAME, ("triton", "triton")), (None, (NAME, NAME))):
            built = build(decode, own, pair, True)
            assert (built.label, built.args) == ("ours, steps", (2, 3))
            assert built.decode_attention_backend_str == NAME
            assert all(c.decode_attention_backend_str == NAME for c in built.attn_backends)
            for mode.speculative_attention_mode in ("prefill", "decode"):
                built = build(extend, own, pair, True)
                assert (built.label, built.kwargs) == ("ours", {"skip_prefill": False})
                assert built.prefill_attention_backend_str == NAME
            # an EAGLE3 draft inherits the name and is MHA: all of it is stock's, the stamp too
            built = build(decode, own, pair, False)
            assert (built.label, built.decode_attention_backend_str) == ("MHA, steps", "flashinfer")
            assert build(extend, own, pair, False).label == "MHA"
        # hybrid: each half of the pair decides its own map
        mode.speculative_attention_mode = "prefill"
        assert build(extend, None, (NAME, "flashinfer"), True).label == "ours"
        assert build(decode, None, (NAME, "flashinfer"), True).label == "stock, steps"
        # stock's own name is untouched, and so are its refusals
        assert build(decode, "flashinfer", (NAME, NAME), True).label == "stock, steps"
        for kind in (decode, extend):
            try:
                build(kind, "nobody", (NAME, NAME), True)
            except ValueError as error:
                assert "EAGLE is not supported in" in str(error) and "nobody" in str(error)
            else:
                raise AssertionError("an unknown draft backend was accepted")
        """,
        plugin_path,
        version,
    )


_OTHER_PLUGIN = """
def register():
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("flashinfer_mla_fp8")(create)


def create(runner):
    return None
"""


@pytest.fixture
def rival_path(tmp_path: Path) -> str:
    """Another installed package whose plugin takes our name first."""
    site = tmp_path / "rival"
    make_distribution(
        site, "rival-attention", "1.0", "[sglang.srt.plugins]\na_rival = rival_attention:register\n"
    )
    (site / "rival-attention-1.0.dist-info" / "top_level.txt").write_text("rival_attention\n")
    (site / "rival_attention.py").write_text(_OTHER_PLUGIN)
    return str(site)


def test_a_taken_name_is_refused_and_its_owner_named(plugin_path: str, rival_path: str) -> None:
    """Two plugins, one name: SGLang logs our refusal, and nothing of ours was installed."""
    output = run_code(
        """
        import logging
        logging.basicConfig()
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.arg_groups import resolution_hooks
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        assert ATTENTION_BACKENDS["flashinfer_mla_fp8"].__module__ == "rival_attention"
        assert not resolution_hooks._HOOKS
        """,
        f"{rival_path}{os.pathsep}{plugin_path}",
    )
    assert "Failed to execute general plugin: flashinfer_mla_fp8" in output
    assert (
        "register: attention backend 'flashinfer_mla_fp8' must be free, got one registered by "
        "rival_attention (distribution rival-attention); uninstall one of the two packages, or "
        "name the plugin to load in SGLANG_PLUGINS"
    ) in output


def test_a_name_taken_later_is_refused_at_launch(plugin_path: str, rival_path: str) -> None:
    """A plugin that loads after ours replaces our factory: SGLang's registry keeps the last."""
    output = run_code(
        """
        import rival_attention
        from sglang.srt.plugins import load_plugins
        from sglang_fp8mla import integration
        from sglang_fp8mla.errors import IncompatibleEnvironment
        integration.install()
        rival_attention.register()
        from sglang.srt.arg_groups import overrides
        overrides.use_mla_backend = lambda server_args: True

        class Args:
            _resolved_overrides = ()
            model_path = "model"
            attention_backend = "flashinfer_mla_fp8"
            prefill_attention_backend = decode_attention_backend = None
            speculative_draft_attention_backend = None

        args = Args()
        nothing = lambda server_args: None
        args._resolved_overrides = []
        integration._resolve_as_stock(args, nothing)
        try:
            integration._resolve_as_ours(args, nothing)
        except IncompatibleEnvironment as error:
            print(error)
        """,
        f"{rival_path}{os.pathsep}{plugin_path}",
    )
    assert "must be free, got one registered by rival_attention" in output


@pytest.mark.parametrize(
    ("break_it", "seam", "level"),
    [
        ("del choices.add_draft_attention_backend_choices", "draft list", "fail"),
        ("resolution_hooks._OVERRIDABLE_HOOKS = frozenset()", "argument resolution", "fail"),
        ("del kv_cache_hook.TRANSLATED_MHA_RAILS", "fused-draft rails", "warn"),
        ("del sglang.srt.plugins.hook_registry.HookRegistry", "draft factory", "fail"),
    ],
)
def test_a_missing_seam_is_reported_and_keeps_no_other_out(
    plugin_path: str, break_it: str, seam: str, level: str
) -> None:
    """A newer SGLang: the name must stay valid, so that the factory can say what is wrong.

    What decides over results is refused then; what costs time or memory is a warning.
    """
    output = run_code(
        f"""
        import logging, sys
        logging.basicConfig()
        import sglang.srt.plugins
        from sglang.srt.arg_groups import choices, kv_cache_hook, resolution_hooks
        {break_it}
        from sglang_fp8mla import BACKEND_NAME, integration, plugin
        plugin.register()
        assert BACKEND_NAME in choices.ATTENTION_BACKEND_CHOICES
        assert integration.name_owner() == "sglang_fp8mla.plugin"
        (check,) = integration.check_seams()
        assert check.level == "{level}" and check.name == "sglang seam: {seam}", check
        try:
            integration.install_late()
        except RuntimeError as error:
            assert "{level}" == "fail" and "sglang seam: {seam}" in str(error), error
            print("refused")
        """,
        plugin_path,
    )
    assert f"flashinfer_mla_fp8: SGLang seam {seam} is not there: " in output
    assert ("refused" in output) == (level == "fail")


def test_a_newer_sglang_is_refused_by_the_factory(plugin_path: str, tmp_path: Path) -> None:
    """Before weights are used, with the found version, the supported ones and a remedy."""
    make_distribution(tmp_path / "newer", "sglang", "0.6.1")
    output = run_code(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        try:
            ATTENTION_BACKENDS["flashinfer_mla_fp8"](None)
        except RuntimeError as error:
            print(error)
        """,
        f"{tmp_path / 'newer'}{os.pathsep}{plugin_path}",
    )
    assert "sglang: 0.6.1, supported is " in output
    assert "pip install sglang==0.5.23 flashinfer-python==0.7.2" in output


@VERSIONS
def test_every_upstream_name_exists(plugin_path: str, version: str) -> None:
    """The tables of compat.py and integration.py against a real release, optional names too."""
    output = run_code(
        """
        import sglang
        print("SGLang is", sglang.__file__)
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang_fp8mla import compat, integration
        names = compat.upstream_names()
        names += tuple(compat.UpstreamName(*entry) for entry in integration.OPTIONAL_NAMES)
        assert len(names) > 30
        # FlashInfer's wrapper is imported by SGLang only where CUDA is
        bad = [str(check) for name in names if not (check := compat.check_name(name)).ok]
        assert not bad, bad
        """,
        plugin_path,
        version,
    )
    assert f"SGLang is {sglang_package(version)}/" in output


@VERSIONS
def test_our_steps_are_the_first_and_the_last(version: str) -> None:
    """A gate outside of them would see our name. Read from the pipeline's source."""
    source = (sglang_package(version) / "srt/arg_groups/pipeline.py").read_text()
    (pipeline,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "run_resolution_pipeline"
    )
    calls = [
        node
        for node in ast.walk(pipeline)
        if isinstance(node, ast.Call) and any("server_args" in ast.unparse(a) for a in node.args)
    ]
    calls.sort(key=lambda node: node.lineno)
    steps = [ast.unparse(call) for call in calls]
    first = steps.index(f"run_hook({FIRST_STEP}, server_args)")
    assert steps[-1] == f"run_hook({LAST_STEP}, server_args)"
    # before the first step the pipeline only takes a record of what the caller asked for
    assert all(
        step.startswith(("getattr(", "type(", "record_", "list(", "resolving_view"))
        for step in steps[:first]
    ), steps[:first]


@VERSIONS
def test_the_launchers_flashinfer_version_is_the_pinned_one(version: str) -> None:
    """We check the version that SGLang's metadata pins in place of the launcher's literal."""
    from importlib.metadata import PathDistribution

    from packaging.requirements import Requirement

    package = sglang_package(version)
    release = next(package.parent.glob("sglang-0.5.*.dist-info"))
    pins = [
        str(requirement.specifier)
        for requirement in map(Requirement, PathDistribution(release).requires or ())
        if requirement.name.replace("_", "-") == "flashinfer-python"
    ]
    tree = ast.parse((package / "srt/entrypoints/engine.py").read_text())
    literals = [
        f"=={ast.literal_eval(node.args[1])}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "assert_pkg_version"
        and ast.literal_eval(node.args[0]) == "flashinfer_python"
    ]
    assert pins == literals
    assert len(pins) == 1


_SPAWNING_MODULE = """
import multiprocessing, sys


def report(queue, words):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    queue.put(("flashinfer_mla_fp8" in ATTENTION_BACKENDS, words, __name__))


if __name__ == "__main__":
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    assert "flashinfer_mla_fp8" in ATTENTION_BACKEND_CHOICES
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=report, args=(queue, sys.argv))
    worker.start()
    print(queue.get(timeout=240))
    worker.join()
    sys.exit(worker.exitcode)
"""


def test_run_loads_plugins_in_spawned_workers_too(plugin_path: str, tmp_path: Path) -> None:
    """`sglang.benchmark.one_batch` parses before plugins load, and its TP workers never do."""
    (tmp_path / "spawning.py").write_text(_SPAWNING_MODULE)
    path = f"{tmp_path}{os.pathsep}{plugin_path}"
    done = python("-m", "sglang_fp8mla.run", "spawning", "--batch", "1", path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(True, ['spawning', '--batch', '1'], '__mp_main__')" in done.stdout


def test_run_makes_the_name_a_choice_of_early_parsers(plugin_path: str) -> None:
    """Their own --help, with ours among the choices; without `run` it is not."""
    for module in ("one_batch", "offline_throughput"):
        words = [f"sglang.benchmark.{module}", "--help"]
        helped = python("-m", "sglang_fp8mla.run", *words, path=plugin_path)
        assert helped.returncode == 0, helped.stderr[-2000:]
        assert "flashinfer_mla_fp8" in helped.stdout, module
    bare = python("-m", "sglang.benchmark.one_batch", "--help", path=plugin_path)
    assert "flashinfer" in bare.stdout
    assert "flashinfer_mla_fp8" not in bare.stdout


def test_run_says_why_the_plugin_is_not_there(
    plugin_path: str, rival_path: str, tmp_path: Path
) -> None:
    """Left out by SGLANG_PLUGINS, not installed, held by another, and no such module."""

    def refusal(path: str, module: str = "json.tool", **env: str) -> str:
        done = python("-m", "sglang_fp8mla.run", module, path=path, env=env)
        assert done.returncode == 1
        return done.stderr.strip().splitlines()[-1]

    root = plugin_path.split(os.pathsep)[1]
    assert refusal(plugin_path, SGLANG_PLUGINS="other") == (
        "run: plugin 'flashinfer_mla_fp8' must be loaded, but SGLANG_PLUGINS='other' leaves it "
        "out: add 'flashinfer_mla_fp8' to it, or unset it"
    )
    empty = tmp_path / "empty"
    make_distribution(empty, "sglang_fp8mla", "0.1.0")  # hides an installed one
    assert refusal(f"{empty}{os.pathsep}{root}") == (
        "run: plugin 'flashinfer_mla_fp8' must be loaded, but no installed package has the entry "
        "point 'flashinfer_mla_fp8': pip install sglang-fp8mla"
    )
    assert "registered by rival_attention" in refusal(f"{rival_path}{os.pathsep}{plugin_path}")
    assert refusal(plugin_path, module="no_such.module").startswith(
        "run: MODULE must be importable, got 'no_such.module': "
    )


_RAY_ACTOR = """
import sys
import ray

hook = {"worker_process_setup_hook": "sglang.srt.plugins.load_plugins"} if sys.argv[1:] else {}
ray.init(num_cpus=1, include_dashboard=False, runtime_env=hook, log_to_driver=False)


@ray.remote
class Actor:
    def known(self):
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        return "flashinfer_mla_fp8" in ATTENTION_BACKENDS


print("known:", ray.get(Actor.remote().known.remote(), timeout=200))
"""


def test_ray_actors_need_the_hook(plugin_path: str, tmp_path: Path) -> None:
    """SGLang's Ray actors load no plugins; the hook that docs/compat.md gives does."""
    ray = pytest.importorskip("ray")
    (tmp_path / "actor.py").write_text(_RAY_ACTOR)
    path = os.pathsep.join([plugin_path, str(Path(ray.__file__).parents[1])])
    env = {"RAY_AUTH_MODE": "disabled"}
    script = str(tmp_path / "actor.py")
    assert "known: False" in python(script, path=path, env=env).stdout
    assert "known: True" in python(script, "hook", path=path, env=env).stdout


_DOORS = {
    "sglang serve": """
        import sglang.cli.serve, sglang.launch_server
        sglang.cli.serve.kill_process_tree = lambda *args, **kwargs: None
        sglang.launch_server.run_server = show
        sys.argv = ["sglang", "serve", *words]
        from sglang.cli.main import main
        main()
    """,
    "python -m sglang.launch_server": """
        import runpy, sglang.srt.utils, sglang.srt.entrypoints.http_server as http_server
        sglang.srt.utils.kill_process_tree = lambda *args, **kwargs: None
        http_server.launch_server = show
        sys.argv = ["launch_server", *words]
        runpy.run_module("sglang.launch_server", run_name="__main__")
    """,
    "sglang.Engine": """
        import sglang
        from sglang.srt.entrypoints.engine import Engine
        class Shown(Exception): pass
        def launch(cls, *, server_args, **kwargs):
            show(server_args)
            raise Shown
        Engine._launch_subprocesses = classmethod(launch)
        keywords = dict(zip(words[::2], words[1::2]))
        try:
            sglang.Engine(**{key[2:].replace("-", "_"): value for key, value in keywords.items()})
        except Shown:
            pass
    """,
}


@pytest.mark.parametrize("door", _DOORS)
def test_every_door_knows_the_name(plugin_path: str, tmp_path: Path, door: str) -> None:
    """SGLang's own entry points, up to where they would start processes."""
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **MODELS["mla"]}))
    words = ["--model-path", str(tmp_path), "--attention-backend", "flashinfer_mla_fp8"]
    words += ["--load-format", "dummy", "--device", "cuda"]
    code = f"""
import sys
words = {words!r}

def show(server_args):
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
    server_args.resolve_once()
    print("door:", attention_backends_of(resolving_view(server_args)))

{textwrap.dedent(_DOORS[door])}
"""
    assert "door: ('flashinfer_mla_fp8', 'flashinfer_mla_fp8')" in run_code(code, plugin_path)
