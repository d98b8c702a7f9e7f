"""Starts, asks and stops real SGLang servers, for `selftest` and `profile`.

Standard library only. A server never outlives this process: see `supervisor.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from .errors import Fp8MlaError, IncompatibleEnvironment, InvalidArgument

# a loopback server must not be looked for behind the user's proxy
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

DEFAULT_LAUNCHER = f"{shlex.quote(sys.executable)} -m sglang.launch_server"

# What a small dummy server needs, and what keeps its times free of anything but decode.
DUMMY_FLAGS: tuple[tuple[str, ...], ...] = (
    ("--load-format", "dummy"),
    ("--skip-tokenizer-init",),
    # FlashInfer's sampling and ragged prefill modules are compiled at first use, for minutes
    ("--sampling-backend", "pytorch"),
    ("--flashinfer-mla-disable-ragged",),
    ("--cuda-graph-max-bs-decode", "8"),
    ("--disable-radix-cache",),
    ("--disable-prefill-cuda-graph",),
    ("--mem-fraction-static", "0.8"),
    ("--random-seed", "1"),
)


class ServerFailed(Fp8MlaError, RuntimeError):
    """A server did not start, died, or answered with an error; the message holds the reason."""


class DeadlinePassed(Fp8MlaError, TimeoutError):
    """The wall-clock ceiling that the user gave was reached."""


@dataclass
class Deadline:
    """Seconds from now; `None` never passes."""

    seconds: float | None = None
    start: float = field(default_factory=time.monotonic)

    def _left(self) -> float:
        if self.seconds is None:
            return float("inf")
        return self.start + self.seconds - time.monotonic()

    @property
    def passed(self) -> bool:
        return self._left() <= 0

    def __str__(self) -> str:
        return f"the deadline of {self.seconds or 0:g} s passed"

    def remaining(self) -> float:
        """Seconds left, infinite without a ceiling.

        Raises:
            DeadlinePassed: nothing is left.
        """
        if self.passed:
            raise DeadlinePassed(str(self))
        return self._left()

    def clip(self, timeout: float) -> float:
        """`timeout`, or what is left if that is less."""
        return min(timeout, self.remaining())


def mla_config(num_layers: int, num_heads: int = 16) -> dict[str, Any]:
    """A DeepSeek-V3 config cut down to dense layers: real MLA dimensions, small everything else."""
    if num_layers < 1 or num_heads < 1:
        raise InvalidArgument(
            f"mla_config: layers and heads must be positive, got {num_layers} and {num_heads}"
        )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        # every layer is dense, so that no MoE kernel is compiled or timed
        "first_k_dense_replace": num_layers,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    }


def write_model(folder: Path, num_layers: int, num_heads: int = 16) -> Path:
    """Write the built-in config to `folder`; with dummy weights that is a whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(mla_config(num_layers, num_heads), indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def dummy_flags(without: Sequence[str] = ()) -> list[str]:
    """`DUMMY_FLAGS` flattened, less those named in `without` (leading dashes optional)."""
    dropped = {name.lstrip("-") for name in without}
    known = {group[0].lstrip("-") for group in DUMMY_FLAGS}
    if dropped - known:
        raise InvalidArgument(
            f"dummy_flags: without must name some of {', '.join(sorted(known))}, "
            f"got {', '.join(sorted(dropped - known))}"
        )
    return [word for group in DUMMY_FLAGS if group[0].lstrip("-") not in dropped for word in group]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def call(
    base: str, path: str, body: object | None = None, *, timeout: float, api_key: str = ""
) -> bytes:
    """One HTTP request: GET without a body, POST of JSON with one.

    Raises:
        ServerFailed: nobody answers, the answer breaks off, takes too long, or is an HTTP error.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(base + path, data, headers)
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        detail = error.read(300).decode("utf-8", "replace").strip()
        raise ServerFailed(f"{base}{path}: HTTP {error.code} {detail or error.reason}") from None
    except TimeoutError:
        raise ServerFailed(f"{base}{path}: no answer within {timeout:.0f} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        # URLError wraps its cause; a connection that breaks off midway is an HTTPException
        reason = getattr(error, "reason", None) or error
        raise ServerFailed(f"{base}{path}: {reason or type(error).__name__}") from None


def make_prompts(bs: int, length: int, vocab_size: int = 31000) -> list[list[int]]:
    """`bs` different prompts of `length` token ids each, the same on every call."""
    return [[(7 * i + 13 * j) % vocab_size + 5 for i in range(length)] for j in range(bs)]


def generate(
    base: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    timeout: float,
    api_key: str = "",
) -> list[list[int]]:
    """Greedy tokens of one batch, exactly `max_new_tokens` for each prompt.

    Raises:
        ServerFailed: see `call`; also when the answer does not hold the tokens asked for.
    """
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params}
    raw = call(base, "/generate", body, timeout=timeout, api_key=api_key)
    try:
        answers = json.loads(raw)
        tokens = [[int(t) for t in answer["output_ids"]] for answer in answers]
    except (ValueError, TypeError, KeyError) as error:
        raise ServerFailed(
            f"{base}/generate: expected answers with output_ids, got {raw[:200]!r} ({error})"
        ) from None
    if [len(t) for t in tokens] != [max_new_tokens] * len(prompts):
        raise ServerFailed(
            f"{base}/generate: expected {len(prompts)} x {max_new_tokens} tokens, "
            f"got {[len(t) for t in tokens]}"
        )
    return tokens


# how a refused start names its cause, most telling first
_CAUSES = (
    "sglang_fp8mla.errors.",
    "IncompatibleEnvironment",
    "InvalidArgument",
    "OutOfMemoryError",
    "error: argument",
    "ModuleNotFoundError",
    "Error: ",
    "Error:",
)


@dataclass
class Server:
    """One server process with everything it started, its log, and its address."""

    name: str
    command: list[str]
    port: int
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log: IO[bytes] | None = field(default=None, repr=False)
    started: float = 0.0

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it in a session of its own, below a supervisor that we hold by a pipe."""
        supervisor = Path(__file__).with_name("supervisor.py")
        self._log = self.log_path.open("wb")
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(supervisor), *self.command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self.env},
        )

    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def exit_within(self, seconds: float) -> int | None:
        """Its exit code, waited for: a broken connection shows before the exit does."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=seconds)
        return None

    def read_log(self) -> str:
        """Its whole log so far."""
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def tail(self, num_lines: int = 15) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 64_000))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-num_lines:]

    def cause(self) -> str:
        """The log line that best says why it ended, or the last line."""
        lines = self.tail(400)
        for mark in _CAUSES:
            for i in range(len(lines) - 1, -1, -1):
                if mark in lines[i]:
                    # a refusal lists its checks on the lines below the first
                    more = [s.strip() for s in lines[i + 1 : i + 6] if s.startswith((" ", "- "))]
                    return " ".join([lines[i].strip(), *more])[:600]
        return lines[-1].strip()[:600] if lines else "the log is empty"

    def require_running(self) -> None:
        """Raises: ServerFailed, when the process has ended."""
        code = self.exit_code()
        if code is not None:
            raise ServerFailed(
                f"{self.name}: the server exited with {code}: {self.cause()} (log: {self.log_path})"
            )

    def healthy(self) -> bool:
        """Whether it answers /health now."""
        try:
            call(self.base, "/health", timeout=5)
        except ServerFailed:
            return False
        return True

    def wait_healthy(
        self, timeout: float, deadline: Deadline, tick: Callable[[], None] = lambda: None
    ) -> float:
        """Wait until it answers, calling `tick` a few times a second; return seconds since start.

        Raises:
            ServerFailed: it ended, or did not answer in time.
            DeadlinePassed: the deadline came first.
        """
        while True:
            self.require_running()
            if self.healthy():
                return time.monotonic() - self.started
            if time.monotonic() - self.started > timeout:
                raise ServerFailed(
                    f"{self.name}: no /health within {timeout:g} s; last line: "
                    f"{(self.tail(1) or ['none'])[0][:300]} (log: {self.log_path})"
                )
            deadline.remaining()
            tick()
            time.sleep(0.2)

    def stop(self) -> None:
        """End it and everything it started. May be called at any time, any number of times."""
        process, self._process = self._process, None
        if process is not None:
            # closing the pipe is the order to kill; the supervisor ends when all are gone
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None


@contextlib.contextmanager
def ending_by_signal() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that `finally` runs."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread: the caller's handlers stay
        for signum in (signal.SIGTERM, signal.SIGHUP):
            previous[signum] = signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def require_gpu() -> None:
    """Ask the driver for a device, without torch and without creating a context.

    Raises:
        IncompatibleEnvironment: there is no driver, or it has no device.
    """
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise IncompatibleEnvironment(
            "no NVIDIA driver (libcuda.so.1) here: run this on the GPU machine; "
            "`sglang-fp8mla demo` shows the idea without one"
        ) from None
    count = ctypes.c_int(0)
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        raise IncompatibleEnvironment(
            f"the NVIDIA driver offers no device (code {code}): check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )


def require_package(module: str, fix: str) -> None:
    """Raises: IncompatibleEnvironment, when `module` is not installed."""
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise IncompatibleEnvironment(f"{module} is not installed: {fix}")
