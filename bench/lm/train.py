"""Train a small byte-level MLA language model and write it as a checkpoint that SGLang serves.

    python -m bench.lm.train DIR --seed N --seconds S      # or --untrained, to boot servers early

The module tree is SGLang's DeepseekV3ForCausalLM with dense layers, name by name, in plain torch:
what is trained here is what a server computes. The text is the Python source of packages that are
installed anyway; files are held out whole, by a hash of their path. Packages hold near copies of
their own files, so the held-out loss flatters the model; differences between servers on the same
windows, which `bench.lm.loss` is after, do not depend on that.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_fp8mla.serving import mla_config

PACKAGES = ("torch", "transformers", "jax", "sympy", "numpy", "scipy", "networkx", "triton")
# what `bench.lm.loss` sends to the servers
WINDOWS, WINDOW = 32, 2048
# of 256 values of the path's first hash byte: 1 file in 32
HELD_OUT = 8


@dataclass(frozen=True)
class Shape:
    """DeepSeek-V3's attention dimensions, but for `nope` (128 there): 64 makes a key as wide as a
    value, which torch's flash attention asks for. Absorbed kernels see 512 + 64 either way.
    `hidden` is no multiple of 256: for those SGLang would compile a GEMM of its own at boot.
    """

    hidden: int = 640
    layers: int = 8
    heads: int = 8
    q_rank: int = 512
    ckv: int = 512
    kpe: int = 64
    nope: int = 64
    value: int = 128
    mlp: int = 1792
    vocab: int = 256
    theta: float = 10000.0
    eps: float = 1e-6
    max_context: int = 4096

    @property
    def sm_scale(self) -> float:
        return float((self.nope + self.kpe) ** -0.5)


def make_config(shape: Shape) -> dict[str, Any]:
    """config.json: every layer dense; no token ends a text, so eos is only a number."""
    return mla_config(shape.layers, shape.heads) | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "kv_lora_rank": shape.ckv,
        "q_lora_rank": shape.q_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.kpe,
        "v_head_dim": shape.value,
        "max_position_embeddings": shape.max_context,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "vocab_size": shape.vocab,
    }


# what a pool does to a row: [..., dim] to [..., dim], of the same dtype
Store = Callable[[Tensor], Tensor]


def stored_as(dtype: torch.dtype) -> Store:
    """A round trip through an FP8 dtype at scale 1, saturating: torch 2.11 makes 464 a NaN."""
    limit = torch.finfo(dtype).max
    return lambda x: x.clamp(-limit, limit).to(dtype).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rope (GPT-J's): pairs (2i, 2i+1) of [..., T, kpe]; cos, sin [T, kpe / 2] fp32."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Norm(nn.RMSNorm):
    """RMSNorm with the weight in the input's dtype: torch's fused kernel takes no mixture."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """MLA without absorption: keys and values are made from the latent, then attended as usual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
        self.q_a_proj = nn.Linear(s.hidden, s.q_rank, bias=False)
        self.q_a_layernorm = Norm(s.q_rank, eps=s.eps)
        self.q_b_proj = nn.Linear(s.q_rank, s.heads * (s.nope + s.kpe), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(s.hidden, s.ckv + s.kpe, bias=False)
        self.kv_a_layernorm = Norm(s.ckv, eps=s.eps)
        self.kv_b_proj = nn.Linear(s.ckv, s.heads * (s.nope + s.value), bias=False)
        self.o_proj = nn.Linear(s.heads * s.value, s.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, store: Store | None, mask: Tensor | None
    ) -> Tensor:
        """x [b, t, hidden]; cos, sin [t, kpe / 2]; mask [t, t] bool, causal when None."""
        s = self.shape
        b, t, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = q.view(b, t, s.heads, -1).transpose(1, 2).split([s.nope, s.kpe], dim=-1)
        ckv, kpe = self.kv_a_proj_with_mqa(x).split([s.ckv, s.kpe], dim=-1)
        ckv, kpe = self.kv_a_layernorm(ckv), rotate(kpe, cos, sin)
        if store is not None:
            ckv, kpe = store(ckv), store(kpe)
        kv = self.kv_b_proj(ckv).view(b, t, s.heads, -1).transpose(1, 2)
        k_nope, value = kv.split([s.nope, s.value], dim=-1)
        query = torch.cat([q_nope, rotate(q_pe, cos, sin)], dim=-1)
        key = torch.cat([k_nope, kpe[:, None].expand(-1, s.heads, -1, -1).to(k_nope.dtype)], dim=-1)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=s.sm_scale
        )
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape)


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, eps=shape.eps)


class Model(nn.Module):
    """The whole model; `state_dict` has the names that SGLang's loader reads."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # what is added to the residual shrinks with depth
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 * ((2 * shape.layers) ** -0.5 if last else 1.0)
                weight.data.normal_(0.0, std, generator=generator)

    def angles(self, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, each [t, kpe / 2] float32."""
        kpe = self.shape.kpe
        rate = self.shape.theta ** (-torch.arange(0, kpe, 2, device=device).double() / kpe)
        angle = torch.arange(t, device=device).double()[:, None] * rate
        return angle.cos().float(), angle.sin().float()

    def forward(self, tokens: Tensor, store: Store | None = None, reach: int = 0) -> Tensor:
        """Logits [b, t, vocab] of the token after each of `tokens` [b, t] int64.

        `store` stands for the pool's dtype; attention sees the last `reach` tokens, all when 0.
        """
        x = self.model.embed_tokens(tokens)
        t = tokens.shape[1]
        cos, sin = self.angles(t, tokens.device)
        mask = None
        if reach:
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril().triu(1 - reach)
        for layer in self.model.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin, store, mask)  # type: ignore[operator]
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]


def token_losses(model: Model, windows: Tensor, **how: Any) -> Tensor:
    """[n, t - 1] float32 nats, on the CPU: the loss of bytes 1 .. t-1 of `windows` [n, t]."""
    losses = []
    with torch.inference_mode():
        for rows in torch.split(windows, 8):
            logits = model(rows[:, :-1], **how).float()
            losses.append(F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none"))
    return torch.cat(losses).cpu()


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and windows of files that are not among them."""

    train: np.ndarray  # [n] uint8
    windows: np.ndarray  # [WINDOWS, WINDOW] uint8
    source: dict[str, Any]  # package -> version, files, bytes


def read_text(
    packages: tuple[str, ...] = PACKAGES, num: int = WINDOWS, length: int = WINDOW
) -> Text:
    """Python source of the packages that are installed, in an order that is the same everywhere.

    Raises:
        SystemExit: fewer than `num` held-out files are twice as long as a window.
    """
    parts: list[bytes] = []
    held: list[tuple[bytes, bytes]] = []
    source: dict[str, Any] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(root.rglob("*.py"))
        size = 0
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as problem:
                print(f"text: {file} is left out: {problem}", flush=True)
                continue
            digest = hashlib.sha256(file.relative_to(root.parent).as_posix().encode()).digest()
            size += len(content)
            if digest[0] < HELD_OUT:
                held.append((digest, content))
            else:
                parts.append(content)
        source[package] = {"version": version_of(package), "files": len(files), "bytes": size}
    # one window a file, from its middle: the head of a file is its licence and imports
    long = [content for _, content in sorted(held) if len(content) >= 2 * length]
    if len(long) < num:
        raise SystemExit(f"text: {num} held-out files of {2 * length} bytes wanted, {len(long)}")
    starts = [(len(content) - length) // 2 for content in long[:num]]
    windows = [
        np.frombuffer(c, np.uint8, length, start) for c, start in zip(long, starts, strict=False)
    ]
    return Text(np.frombuffer(b"\n".join(parts), np.uint8), np.stack(windows), source)


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def learning_rate(done: float, peak: float) -> float:
    """Warm-up over the first 3 % of the time, then a cosine down to 5 % of the peak."""
    if done < 0.03:
        return peak * done / 0.03
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.03) / 0.97))))


def train(
    model: Model, text: Tensor, seed: int, end: float, batch: int, length: int, peak: float = 1e-3
) -> dict[str, Any]:
    """Train in place until time.monotonic() passes `end`.

    Args:
        text: [n] uint8, on the model's device; windows start anywhere, across files too.
        batch, length: of one step; `length` bytes are predicted.

    Raises:
        SystemExit: the loss is not finite.
    """
    device = text.device
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    generator = torch.Generator(device).manual_seed(seed + 1)
    window = torch.arange(length + 1, device=device)
    begin = said = time.monotonic()
    steps, since, total = 0, 0, torch.zeros((), device=device)
    history: list[list[float]] = []
    while (now := time.monotonic()) < end or not steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate((now - begin) / max(end - begin, 1e-9), peak)
        start = torch.randint(
            len(text) - length - 1, (batch, 1), device=device, generator=generator
        )
        rows = text[start + window].long()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        steps, since = steps + 1, since + 1
        if steps == 1 or now - said > 10 or time.monotonic() >= end:
            mean = total.item() / since  # waits for the device
            said, since, total = time.monotonic(), 0, torch.zeros((), device=device)
            history.append([round(said - begin, 1), steps, round(mean, 4)])
            print(f"seed {seed}: {said - begin:6.1f} s, step {steps}, loss {mean:.4f}", flush=True)
            if not math.isfinite(mean):
                raise SystemExit(f"seed {seed}: the loss is {mean} at step {steps}")
    return {
        "steps": steps,
        "tokens": steps * batch * length,
        "seconds": round(time.monotonic() - begin, 1),
        "train_loss": history[-1][2],
        "history_s_step_loss": history,
    }


# held-out losses of torch's own model, by name: as it is, with rows stored in FP8, short-sighted
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_e4m3": {"store": stored_as(torch.float8_e4m3fn)},
    "fp8_e5m2": {"store": stored_as(torch.float8_e5m2)},
    "reach_128": {"reach": 128},
}


def measure(model: Model, windows: Tensor) -> dict[str, np.ndarray]:
    """[n, t - 1] float32 losses of a bf16 model in each of WAYS.

    The FP8 ones foretell what a server's FP8 pool should cost; the last one says how much of the
    loss hangs on what lies further back.
    """
    return {name: token_losses(model, windows, **how).numpy() for name, how in WAYS.items()}


def export(model: Model, directory: Path) -> None:
    """Write model.safetensors (bf16) and config.json."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(make_config(model.shape), indent=1))


def main() -> None:
    """Parse arguments, train, write the checkpoint, held_out.npz and meta.json."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=150, help="from now to the end of training"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=WINDOW)
    parser.add_argument("--untrained", action="store_true", help="write random weights, no meta")
    for field in ("hidden", "layers", "mlp"):
        parser.add_argument(f"--{field}", type=int, default=getattr(Shape, field))
    options = parser.parse_args()
    shape = Shape(hidden=options.hidden, layers=options.layers, mlp=options.mlp)
    model = Model(shape, options.seed)
    if options.untrained:
        export(model, options.directory)
        print(f"{options.directory}: untrained")
        return
    text = read_text()
    print(f"text: {json.dumps(text.source)}, {time.monotonic() - begin:.1f} s", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    # frombuffer's arrays are read-only, which torch warns of
    held = torch.from_numpy(text.windows.copy()).to(device).long()
    data = torch.from_numpy(text.train.copy()).to(device)
    end = begin + options.seconds
    meta = train(model, data, options.seed, end, options.batch, options.length)
    served = model.bfloat16()
    export(served, options.directory)
    held_out = measure(served, held)
    np.savez(options.directory / "held_out.npz", windows=text.windows, **held_out)  # type: ignore[arg-type]
    parameters = sum(p.numel() for p in model.parameters())
    meta = {
        "seed": options.seed,
        "shape": vars(shape),
        "parameters": parameters,
        **meta,
        "batch": options.batch,
        "length": options.length,
        "text": text.source,
        "train_bytes": len(text.train),
        "held_out": {name: float(losses.mean()) for name, losses in held_out.items()},
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    # last, and at once: its presence says that the directory is whole
    part = options.directory / "meta.json.part"
    part.write_text(json.dumps(meta, indent=1))
    part.rename(options.directory / "meta.json")
    losses = ", ".join(f"{k} {v:.4f}" for k, v in meta["held_out"].items())
    print(f"{options.directory}: {meta['steps']} steps, held out: {losses}", flush=True)


if __name__ == "__main__":
    main()
