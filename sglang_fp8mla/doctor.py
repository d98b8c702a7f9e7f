"""`sglang-fp8mla doctor`: can the backend run here, which path would it take, and why.

Only the standard library at module level, and every probe is guarded: what is missing or broken
becomes a row with a remedy, never a traceback. The checks are the backend factory's own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from . import BACKEND_NAME, __version__
from .checks import Check, Level, failed
from .tables import human_bytes, print_table

PLUGIN_GROUP = "sglang.srt.plugins"
DISTRIBUTION = "sglang-fp8mla"
_MARKS: dict[Level, str] = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}
_STYLES: dict[Level, str] = {"ok": "", "warn": "yellow", "fail": "bold red"}

_DESCRIPTION = f"""\
Find out whether `--attention-backend {BACKEND_NAME}` runs on this
machine, which path it would take for decode and extend, and why. Runs the checks
that the server runs at start, and says for each one that fails what to do.
Imports SGLang, which takes some seconds; on a GPU the first run may compile
kernels, once.

A FAIL keeps the backend from running. A WARN does not: it names what another
path lacks, or what could not be looked at."""

_EPILOG = """\
examples:
  sglang-fp8mla doctor                 the table
  sglang-fp8mla doctor --report        a block to paste into a bug report
  sglang-fp8mla doctor --json          the same as data
  sglang-fp8mla doctor --self-test     also cast all 256 FP8 codes, bit for bit
  sglang-fp8mla doctor --no-probe      run nothing on the GPU
  sglang-fp8mla doctor --model glm-5 --tp 8
                                       the paths for this model

exit codes: 0 the backend can run here, 1 it cannot, 2 a wrong argument"""


@dataclass
class Section:
    """Checks that belong together, under one title."""

    title: str
    checks: list[Check] = field(default_factory=list)


@dataclass
class Diagnosis:
    sections: list[Section]
    decision: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return not any(failed(section.checks) for section in self.sections)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "version": __version__,
            "decision": self.decision,
            "sections": [
                {"title": s.title, "checks": [check.to_json() for check in s.checks]}
                for s in self.sections
            ],
        }


def _guarded(name: str, probe: Callable[[], list[Check]]) -> list[Check]:
    try:
        return probe()
    # doctor's one job is to survive whatever is wrong; SystemExit: some packages exit on import
    except (Exception, SystemExit) as error:
        return [Check(name, "fail", f"the check failed with {type(error).__name__}: {error}")]


@contextlib.contextmanager
def _quiet(enabled: bool) -> Iterator[None]:
    """Keep what imports print, C libraries included, out of the table and out of the JSON."""
    if not enabled:
        yield
        return
    with tempfile.TemporaryFile() as sink:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            os.close(saved[0])
            os.close(saved[1])


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# --- the package and its settings -------------------------------------------------------------


def check_package() -> list[Check]:
    where = Path(__file__).resolve().parent
    checks = [
        Check("sglang-fp8mla", "ok", __version__),
        Check("installed in", "ok", str(where)),
        Check(
            "python",
            "ok",
            f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        ),
    ]
    for name, level, loss in (
        ("packaging", "fail", "versions cannot be compared"),
        ("rich", "warn", "tables are plain"),
    ):
        try:
            importlib.import_module(name)
        except ImportError as error:
            found = f"does not import, {loss}: {error}"
            checks.append(Check(name, level, found, f"pip install {name}"))  # type: ignore[arg-type]
    return checks


def check_settings() -> list[Check]:
    """Our own environment variables; no other one is read or printed."""
    from .envs import ENVIRONMENT, PREFIX, read
    from .errors import InvalidArgument

    shown = [
        Check(name, "ok", repr(value))
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX)
    ]
    try:
        settings = read()
    except InvalidArgument as error:
        fix = "correct or unset it; docs/configuration.md lists all"
        return [*shown, Check("environment", "fail", str(error), fix)]
    if not shown:
        return [Check("environment", "ok", f"none of {len(ENVIRONMENT)} variables set: defaults")]
    if settings.profile:
        shown.append(check_profile(Path(settings.profile)))
    return shown


def check_profile(path: Path) -> Check:
    """Is the user's table readable, and for which GPU generations? The choice reads it in full."""
    try:
        generations = json.loads(path.read_text(encoding="utf-8"))["generations"]
        return Check("profile", "ok", f"{path} holds {', '.join(sorted(generations))}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{path} is not a table: {type(error).__name__}: {error}"
        return Check("profile", "fail", found, "correct or unset SGLANG_FP8MLA_PROFILE")


# --- SGLang and FlashInfer --------------------------------------------------------------------


def check_plugin() -> list[Check]:
    """Does SGLang find our entry point, and may it load it? Reads metadata, imports nothing."""
    found = [e for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == BACKEND_NAME]
    if not found:
        return [
            Check(
                "plugin entry point",
                "fail",
                f"no installed distribution offers {BACKEND_NAME} in {PLUGIN_GROUP}",
                f"pip install {DISTRIBUTION} (a checkout on PYTHONPATH is not enough)",
            )
        ]
    owners = sorted({e.dist.name if e.dist else "?" for e in found})
    if owners != [DISTRIBUTION]:
        return [
            Check(
                "plugin entry point",
                "fail",
                f"{BACKEND_NAME} is offered by {', '.join(owners)}",
                f"uninstall all of them but {DISTRIBUTION}",
            )
        ]
    checks = [Check("plugin entry point", "ok", f"{PLUGIN_GROUP}: {found[0].value}")]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    if names and BACKEND_NAME not in names:
        checks.append(
            Check(
                "SGLANG_PLUGINS",
                "fail",
                f"restricts SGLang's plugins and leaves {BACKEND_NAME} out",
                f"add {BACKEND_NAME} to it, or unset it",
            )
        )
    elif names:
        checks.append(Check("SGLANG_PLUGINS", "ok", f"lists {BACKEND_NAME}"))
    else:
        checks.append(Check("SGLANG_PLUGINS", "ok", "not set: SGLang loads every plugin"))
    return checks


def check_environment(verbose: bool) -> list[Check]:
    """The factory's checks of versions and upstream names; names that pass become one row."""
    from . import compat

    checks = compat.check_environment()
    if verbose:
        return checks
    versions = {check.name for check in compat.check_versions()}
    passed = [check for check in checks if check.level == "ok" and check.name not in versions]
    rest = [check for check in checks if check not in passed]
    if passed:
        names = len(checks) - len(versions)
        rest.append(Check("upstream names", "ok", f"{len(passed)} of {names} as we use them"))
    return rest


def check_registration() -> list[Check]:
    """Load plugins as a server does, then look who holds the name and what was wired up."""
    from sglang.srt.plugins import load_plugins

    from . import integration, plugin

    load_plugins()
    owner = integration.name_owner()
    ours = plugin.create_backend.__module__
    if owner is None:
        try:
            integration.install()
            reason = "SGLang did not load the plugin"
        # what register() raises, SGLang logs and swallows: say it here
        except Exception as error:
            reason = f"register() failed: {error}"
        fix = "see the plugin rows above; the server's log has the line 'Failed to execute'"
        return [Check("name registered", "fail", reason, fix)]
    if owner != ours:
        fix = "uninstall one of the two packages, or choose with SGLANG_PLUGINS"
        return [Check("name registered", "fail", f"{BACKEND_NAME} belongs to {owner}", fix)]
    integration.install_late()
    return [
        Check("name registered", "ok", f"{BACKEND_NAME} is ours ({owner})"),
        *integration.check_seams(),
    ]


# --- the machine ------------------------------------------------------------------------------


def check_torch() -> list[Check]:
    """torch and triton; triton by metadata alone, since its import fixes how kernels are run."""
    triton = _installed("triton")
    if triton is None:
        triton_row = Check("triton", "fail", "not installed", "it comes with torch on Linux")
    else:
        triton_row = Check("triton", "ok", triton)
    version = _installed("torch")
    try:
        import torch
    except (ImportError, OSError) as error:
        found = "not installed" if version is None else f"{version}, does not import: {error}"
        fix = "install SGLang, which brings its torch"
        return [Check("torch", "fail", found, fix), triton_row]
    return [Check("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}"), triton_row]


def check_devices() -> list[Check]:
    """Each visible GPU: name, compute capability, memory. Creates no CUDA context where none is."""
    import torch

    if not torch.cuda.is_available():
        found = "no CUDA device is visible to torch"
        if torch.version.cuda is None:
            found += ": this torch was built without CUDA"
        fix = "run on a machine with an NVIDIA GPU; `nvidia-smi` must list it"
        return [Check("GPU", "fail", found, fix)]
    checks = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sm = f"SM{properties.major}{properties.minor}"
        found = f"{properties.name}, {sm}, {human_bytes(properties.total_memory)}"
        if (properties.major, properties.minor) < (8, 0):
            fix = "SM80 (A100) or newer is needed"
            checks.append(Check(f"GPU {index}", "fail", found, fix))
        else:
            checks.append(Check(f"GPU {index}", "ok", found))
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        checks.append(Check("driver", "ok", driver))
    return checks


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def check_toolchain() -> list[Check]:
    """What FlashInfer's FP8 modules are compiled with, and where the results are kept."""
    checks = []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    nvcc = next((path for path in candidates if os.access(path, os.X_OK)), None)
    need = "only `native` needs it, once, to compile FlashInfer's FP8 kernel"
    if home and candidates[0] != nvcc:
        found = f"CUDA_HOME points to a folder without bin/nvcc; {need}"
        checks.append(Check("nvcc", "warn", found, "point CUDA_HOME at a CUDA toolkit"))
    elif nvcc is None:
        fix = "install the CUDA toolkit of torch's CUDA version, or set CUDA_HOME"
        checks.append(Check("nvcc", "warn", f"not found; {need}", fix))
    else:
        release = _first_line_with("release", str(nvcc), "--version")
        checks.append(Check("nvcc", "ok", f"{nvcc}{', ' + release if release else ''}"))
    if shutil.which("ninja"):
        checks.append(Check("ninja", "ok", str(shutil.which("ninja"))))
    else:
        checks.append(Check("ninja", "warn", f"not on PATH; {need}", "pip install ninja"))
    home_cache = Path.home() / ".cache"
    flashinfer_base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    # as kernels/nvrtc.py and flashinfer.jit.env find them; importing either needs more than stdlib
    for name, folder, variable in (
        (
            "FlashInfer JIT cache",
            (Path(flashinfer_base) / ".cache" if flashinfer_base else home_cache) / "flashinfer",
            "FLASHINFER_WORKSPACE_BASE",
        ),
        (
            "fused kernel cache",
            Path(os.environ.get("XDG_CACHE_HOME") or home_cache) / "sglang_fp8mla",
            "XDG_CACHE_HOME",
        ),
    ):
        existing = next((p for p in (folder, *folder.parents) if p.exists()), None)
        if existing is None or not os.access(existing, os.W_OK):
            fix = f"make it writable, or set {variable}; else each start compiles anew"
            checks.append(Check(name, "warn", f"{folder} is not writable", fix))
        else:
            checks.append(Check(name, "ok", f"{folder}{'' if folder.exists() else ' (none yet)'}"))
    return checks


def _first_line_with(word: str, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next((line.strip() for line in done.stdout.splitlines() if word in line), "")


# --- which path, and why ----------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What the path depends on besides the GPU: the served model's shape and dtypes."""

    num_heads: int = 16
    ckv_dim: int = 512
    kpe_dim: int = 64
    q_dtype: str = "bfloat16"
    pool_dtype: str = "float8_e4m3fn"

    def __str__(self) -> str:
        return (
            f"{self.num_heads} heads per GPU, rows of {self.ckv_dim} + {self.kpe_dim}, "
            f"q {self.q_dtype}, pool {self.pool_dtype}"
        )


def check_paths(served: Served, probing: str) -> tuple[list[Check], dict[str, Any] | None]:
    """What the factory would choose on GPU 0 for `served`.

    Args:
        served: the model.
        probing: "none" asks metadata only, "needed" probes what the choice hangs on, as the
            factory does, "all" probes every path.

    Returns:
        The rows, and the decision as data; None when no path can run.
    """
    import torch

    from . import policy, probe
    from .envs import DECODE_PATHS, EXTEND_PATHS, read
    from .errors import Fp8MlaError

    facts = probe.Facts(
        device_name=torch.cuda.get_device_name(0),
        capability=torch.cuda.get_device_capability(0),
        num_heads=served.num_heads,
        ckv_dim=served.ckv_dim,
        kpe_dim=served.kpe_dim,
        q_dtype=served.q_dtype,
        pool_dtype=served.pool_dtype,
        flashinfer=_installed("flashinfer-python") or "",
    )
    probed: dict[tuple[str, str], Check] = {}

    def ask(path: str, phase: str) -> Check:
        if (path, phase) not in probed:
            if probing == "none":
                probed[path, phase] = probe.check_supported(path, facts)
            else:
                probed[path, phase] = probe.run_probe(path, phase, facts, "cuda:0")
        return probed[path, phase]

    rows = [Check("asked for", "ok", str(served))]
    settings = read()
    try:
        decision, _ = policy.choose(facts, settings, ask)
    except Fp8MlaError as error:
        return [
            *rows,
            Check("choice", "fail", str(error), "docs/fallback.md says what each needs"),
        ], None
    rows.append(Check("table", "ok", settings.profile or "the package's own"))
    chosen: dict[str, Any] = {}
    for choice in (decision.decode, decision.extend):
        # a path that is faster when measured, and failed its check here
        level: Level = "warn" if failed(list(choice.checks)) else "ok"
        rows.append(Check(choice.phase, level, f"{choice}: {choice.reason}"))
        chosen[choice.phase] = {
            "by_batch": [list(step) for step in choice.by_batch],
            "paths": list(choice.paths),
            "reason": choice.reason,
        }
    for phase, paths in (("decode", DECODE_PATHS[1:]), ("extend", EXTEND_PATHS[1:])):
        for path in paths:
            supported = probe.check_supported(path, facts)
            wanted = probing == "all" or (path, phase) in probed
            ran = probing != "none" and supported.ok and wanted
            check = ask(path, phase) if ran else supported
            rows.append(_path_row(f"{path} {phase}", check, supported=supported.ok, ran=ran))
    return rows, chosen


def _path_row(name: str, check: Check, *, supported: bool, ran: bool) -> Check:
    """One path in one phase. None of them is a failure: another path does the work."""
    if not supported:
        return Check(name, "ok", f"not here: {check.found}")
    if not ran:
        return Check(name, "ok", f"possible, not probed: {check.found}")
    if not check.ok:
        return Check(name, "warn", f"failed its probe: {check.found}", check.fix)
    return Check(name, "ok", f"probed: {check.found}")


_INTERPRETER_FAILED = 3


def self_test() -> list[Check]:
    """Cast all 256 codes of both FP8 dtypes with the package's kernel, in a process of its own."""
    code = "import sys; from sglang_fp8mla import doctor; sys.exit(doctor._self_test_main())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [Check("self-test", "fail", f"its process failed: {error}", "please report this")]
    lines = done.stdout.strip().splitlines()
    if done.returncode == _INTERPRETER_FAILED and lines:
        fix = "run it on the GPU machine, or with an older numpy"
        return [Check("self-test", "warn", lines[-1], fix)]
    if done.returncode not in (0, 1) or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Check("self-test", "fail", last, "please report this")]
    level: Level = "ok" if done.returncode == 0 else "fail"
    return [Check("self-test", level, lines[-1], "" if level == "ok" else "please report this")]


def _self_test_main() -> int:
    """Body of the self-test's process: prints one line; 0 when every code is right.

    1 when one is wrong, 3 when Triton's interpreter cannot run at all (no GPU, and a numpy that it
    does not know).
    """
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # read once, when triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.errors import InterpreterError

    try:
        bad = _miscast_codes(device)
    except InterpreterError as error:
        print(f"Triton's interpreter does not run here: {error}")
        return _INTERPRETER_FAILED
    where = torch.cuda.get_device_name(0) if device != "cpu" else "the CPU, interpreted"
    if bad:
        print(f"wrong values on {where}: {', '.join(bad)}")
        return 1
    print(f"all 256 codes of e4m3 and e5m2 to bf16 and fp16 exact on {where}")
    return 0


def _miscast_codes(device: str) -> list[str]:
    """The casts, as `dtype to dtype`, for which the kernel gave a wrong value on `device`."""
    import torch

    from .kernels.gather_cast import gather_cast
    from .workspace import LiveSlots

    bad = []
    for pool_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        # row i holds all codes, rotated by i, so that each column sees several codes
        steps = torch.arange(576)[None, :] + torch.arange(64)[:, None]
        codes = (steps % 256).to(torch.uint8)
        # the NaN codes of a pool may stay NaN only
        pool = codes.to(device).view(pool_dtype)
        kv_indices = torch.arange(1, 64, 2, dtype=torch.int32, device=device)
        kv_indptr = torch.tensor([0, kv_indices.numel()], dtype=torch.int32, device=device)
        live = LiveSlots(64, pool.device)
        kv_rows = live.update(kv_indices, kv_indptr, 1)
        for out_dtype in (torch.bfloat16, torch.float16):
            out = torch.full((64, 576), 7.0, dtype=out_dtype, device=device)
            gather_cast(pool, live.slots, live.count, live.tickets, out)
            want = codes.view(pool_dtype).to(torch.float32).to(out_dtype)[1::2]
            rows, rest = out.cpu()[kv_rows.cpu().long()], out.cpu()[kv_indices.numel() :]
            right = torch.equal(rows.nan_to_num(12345.0), want.nan_to_num(12345.0))
            if not right or not (rest == 7).all():
                bad.append(f"{pool_dtype} to {out_dtype}")
    return bad


# --- the whole ---------------------------------------------------------------------------------


def diagnose(
    served: Served = Served(),
    *,
    probing: str = "needed",
    with_self_test: bool = False,
    verbose: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Run every check; never raises."""
    package = Section("package")
    package.checks += _guarded("package", check_package)
    package.checks += _guarded("environment", check_settings)

    sglang = Section("SGLang and FlashInfer")
    sglang.checks += _guarded("plugin entry point", check_plugin)
    progress("importing SGLang and FlashInfer, some seconds ...")
    sglang.checks += _guarded("upstream", lambda: check_environment(verbose))
    if not failed(sglang.checks):
        sglang.checks += _guarded("name registered", check_registration)
    else:
        sglang.checks.append(Check("name registered", "warn", "not tried: a check above failed"))

    device = Section("GPU")
    device.checks += _guarded("torch", check_torch)
    if not failed(device.checks):
        device.checks += _guarded("GPU", check_devices)
    device.checks += _guarded("toolchain", check_toolchain)

    paths = Section("paths")
    decision = None
    if failed(device.checks) or failed(package.checks):
        paths.checks.append(Check("choice", "warn", "not tried: a check above failed"))
    else:
        if probing != "none":
            progress("probing paths on the GPU; a first run compiles kernels ...")

        def probe_paths() -> list[Check]:
            nonlocal decision
            rows, decision = check_paths(served, probing)
            return rows

        paths.checks += _guarded("choice", probe_paths)
    if with_self_test:
        progress("running the kernel self-test ...")
        paths.checks += _guarded("self-test", self_test)
    return Diagnosis([package, sglang, device, paths], decision)


def _verdict(diagnosis: Diagnosis) -> str:
    bad = [check.name for section in diagnosis.sections for check in failed(section.checks)]
    if bad:
        return f"{BACKEND_NAME} cannot run here: {', '.join(bad)}"
    if diagnosis.decision is None:
        return f"{BACKEND_NAME} can run here; no path was chosen"
    phases = ", ".join(
        f"{phase} by {' / '.join(choice['paths'])}" for phase, choice in diagnosis.decision.items()
    )
    return f"{BACKEND_NAME} can run here: {phases}"


def report_text(diagnosis: Diagnosis) -> str:
    """The block for a bug report: Markdown, no colours, the home folder as `~`."""
    lines = ["```", f"sglang-fp8mla doctor {__version__}: {_verdict(diagnosis)}"]
    for section in diagnosis.sections:
        lines.append(f"[{section.title}]")
        lines += [
            f"{_MARKS[check.level]:<4} {check.name}: {check.found}" for check in section.checks
        ]
    lines.append("```")
    text = "\n".join(lines)
    home = str(Path.home())
    return text if home in ("/", "") else text.replace(home, "~")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    # one width for all sections, so that their columns line up
    names = max(len(check.name) for section in diagnosis.sections for check in section.checks)
    for section in diagnosis.sections:
        rows, styles = [], []
        for check in section.checks:
            rows.append((f"{_MARKS[check.level]:<4}", check.name.ljust(names), check.found))
            styles.append(_STYLES[check.level])
            if check.fix and check.level != "ok":
                rows.append(("", "", f"-> {check.fix}"))
                styles.append("")
        columns = ("", "check", "found")
        print_table(section.title, columns, rows, styles=styles, header=False)
    print(_verdict(diagnosis))
    if not diagnosis.ok:
        print("For a bug report: sglang-fp8mla doctor --report")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="can the backend run here, which path would it take, and why",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument("--report", action="store_true", help="print a block for a bug report")
    add(
        "--verbose",
        action="store_true",
        help="list every upstream name, and show what imports print",
    )
    add("--self-test", action="store_true", help="run the kernel over all FP8 codes")
    probing = parser.add_mutually_exclusive_group()
    probing.add_argument("--no-probe", action="store_true", help="run nothing on the GPU")
    probing.add_argument(
        "--all-paths", action="store_true", help="probe every path, not only those the choice needs"
    )
    served = Served()
    add(
        "--model",
        metavar="MODEL",
        help="config.json, its folder, or a built-in name (see estimate)",
    )
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel size, with --model (%(default)s)",
    )
    add("--heads", type=int, metavar="N", help=f"query heads per GPU ({served.num_heads})")
    add(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="model dtype (%(default)s)",
    )
    add(
        "--kv-cache-dtype",
        choices=("fp8_e4m3", "fp8_e5m2"),
        default="fp8_e4m3",
        help="pool dtype (%(default)s)",
    )
    parser.set_defaults(func=run)


def _served(args: argparse.Namespace) -> Served:
    from .errors import InvalidArgument
    from .models import heads_per_gpu, load_model

    if args.heads is not None and args.heads < 1:
        raise InvalidArgument(f"doctor: --heads must be >= 1, got {args.heads}")
    dtypes = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    base = {"q_dtype": args.dtype, "pool_dtype": dtypes[args.kv_cache_dtype]}
    if args.model is None:
        return Served(num_heads=args.heads or Served.num_heads, **base)
    model = load_model(args.model)
    return Served(
        num_heads=args.heads or heads_per_gpu(model, args.tp),
        ckv_dim=model.ckv_dim,
        kpe_dim=model.kpe_dim,
        **base,
    )


def run(args: argparse.Namespace) -> int:
    served = _served(args)
    # the real stderr: descriptor 2 is muted while the checks run
    terminal = os.fdopen(os.dup(sys.stderr.fileno()), "w") if sys.stderr.isatty() else None

    def progress(text: str) -> None:
        if terminal is not None:
            print(text, file=terminal, flush=True)

    with _quiet(not args.verbose):
        diagnosis = diagnose(
            served,
            probing="none" if args.no_probe else "all" if args.all_paths else "needed",
            with_self_test=args.self_test,
            verbose=args.verbose,
            progress=progress,
        )
    if args.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    elif args.report:
        print(report_text(diagnosis))
    else:
        print_diagnosis(diagnosis)
    return 0 if diagnosis.ok else 1
