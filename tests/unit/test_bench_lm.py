"""The language model of `bench.lm`: torch's model, SGLang's model, and what is asked of servers.

Run as a script this file is what the tests start: a server of a few endpoints over torch's model
(`serve`), or SGLang's own DeepseekV3ForCausalLM on the CPU (`sglang`), which writes to a process
what no other test should see.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.lm import forcing, loss, train  # noqa: E402

TINY = train.Shape(hidden=64, layers=2, heads=2, q_rank=32, ckv=512, mlp=96)
# of one run's first server; 400 a server
PORT = 15000 + os.getpid() % 380
PROMPT, FORCED, WINDOW = 9, 8, 24


def random_model(seed=0, shape=TINY):
    """Weights large enough that attention is far from uniform, and norms that are not ones."""
    model = train.Model(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = 1 + 0.2 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5
    return model


def make_checkpoint(directory, seed, windows):
    """A directory as `bench.lm.train` leaves it, of random weights."""
    model = random_model(seed)
    train.export(model, directory)
    served = model.bfloat16().float()
    found = train.measure(served, torch.from_numpy(windows).long())
    np.savez(directory / "held_out.npz", windows=windows, **found)
    (directory / "meta.json").write_text(json.dumps({"seed": seed}))
    return served


def load(directory):
    from safetensors.torch import load_file

    model = train.Model(TINY)
    weights = load_file(Path(directory) / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


def ref_logits(model, tokens):
    """Absorbed MLA in float64, one key row of 512 + 64 for all heads, as complex rotations."""
    s = model.shape
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + s.eps).rsqrt() * w[name]

    def rotate(x):
        at = torch.arange(len(tokens)).double()
        rate = s.theta ** (-torch.arange(s.kpe // 2).double() * 2 / s.kpe)
        turn = torch.polar(torch.ones(1).double(), at[:, None] * rate)
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn.view(len(tokens), *[1] * (x.dim() - 2), -1)).flatten(
            -2
        )

    x = w["model.embed_tokens.weight"][tokens]
    seen = torch.ones(len(tokens), len(tokens)).tril().bool()
    for n in range(s.layers):
        at = f"model.layers.{n}"
        h = norm(x, f"{at}.input_layernorm.weight")
        a = f"{at}.self_attn"
        q = norm(h @ w[f"{a}.q_a_proj.weight"].T, f"{a}.q_a_layernorm.weight")
        q = (q @ w[f"{a}.q_b_proj.weight"].T).view(len(tokens), s.heads, -1)
        row = h @ w[f"{a}.kv_a_proj_with_mqa.weight"].T
        ckv = norm(row[:, : s.ckv], f"{a}.kv_a_layernorm.weight")
        keys = torch.cat([ckv, rotate(row[:, s.ckv :])], -1)
        up = w[f"{a}.kv_b_proj.weight"].view(s.heads, s.nope + s.value, s.ckv)
        absorbed = torch.einsum("thd,hdc->thc", q[..., : s.nope], up[:, : s.nope])
        absorbed = torch.cat([absorbed, rotate(q[..., s.nope :])], -1)
        scores = torch.einsum("thc,uc->htu", absorbed, keys) / math.sqrt(s.nope + s.kpe)
        share = scores.masked_fill(~seen, -math.inf).softmax(-1)
        latent = torch.einsum("htu,uc->thc", share, ckv)
        out = torch.einsum("thc,hdc->thd", latent, up[:, s.nope :]).flatten(1)
        x = x + out @ w[f"{a}.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def test_torch_model_is_absorbed_mla():
    """The attention that is trained is the one that servers compute in absorbed form."""
    model = random_model()
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        actual = model(tokens[None])[0]
    torch.testing.assert_close(actual.double(), ref_logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_store_and_reach_change_what_attention_sees():
    model = random_model()
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = model(tokens)
        torch.testing.assert_close(model(tokens, reach=40), plain, rtol=1e-4, atol=1e-4)
        near = model(tokens, reach=4)
        # the first tokens see all there is, in both
        torch.testing.assert_close(near[:, :4], plain[:, :4], rtol=1e-4, atol=1e-4)
        assert (near[:, 10:] - plain[:, 10:]).abs().max() > 0.1
        off = [
            (model(tokens, store=train.stored_as(dtype)) - plain).pow(2).mean().sqrt().item()
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        ]
    assert 0 < off[0] < off[1]


def test_a_short_training_learns_and_exports(tmp_path):
    """The checkpoint holds the names and shapes of a DeepSeek-V3 with q_lora, in bf16."""
    from safetensors.torch import load_file

    text = torch.frombuffer(bytearray(b"def f(x):\n    return x\n" * 400), dtype=torch.uint8)
    model = train.Model(TINY)
    steps = train.train(model, text, seed=0, end=0.0, batch=2, length=32)
    assert steps["steps"] == 1
    first = steps["train_loss"]
    end = train.time.monotonic() + 6
    assert train.train(model, text, 0, end, 4, 32, peak=3e-3)["train_loss"] < first - 1
    train.export(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    from bench.serve.make_nextn import make_tensors

    served = {name for group in make_tensors(2) for name, _ in group if "layers.2." not in name}
    assert set(weights) == served
    config = json.loads((tmp_path / "config.json").read_text())
    assert weights["model.layers.1.self_attn.kv_b_proj.weight"].shape == (
        config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["v_head_dim"]),
        config["kv_lora_rank"],
    )


def test_text_holds_files_out_whole(tmp_path, monkeypatch):
    """No window's file is trained on, and the split does not move with the directory."""
    texts = []
    for where in ("one", "two"):
        package = tmp_path / where / "someone"
        (package / "sub").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        for i in range(300):
            (package / "sub" / f"m{i}.py").write_text(f"name_{i:04d}\n" * 20)
        monkeypatch.syspath_prepend(str(tmp_path / where))
        monkeypatch.delitem(sys.modules, "someone", raising=False)
        texts.append(train.read_text(("someone", "not_installed_here"), num=3, length=32))
        monkeypatch.undo()
    text = texts[0]
    assert text.windows.shape == (3, 32)
    np.testing.assert_array_equal(text.windows, texts[1].windows)
    assert text.source["someone"]["files"] == 301
    for window in text.windows:
        name = window.tobytes().split(b"\n")[1]
        assert name.startswith(b"name_")
        assert name not in text.train.tobytes()
    with pytest.raises(SystemExit, match="held-out files"):
        train.read_text(("someone",), num=1)


def test_learning_rate_rises_and_falls():
    rates = [train.learning_rate(i / 100, 1.0) for i in range(101)]
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[0] == 0
    assert rates[100] == pytest.approx(0.05)


def requests_of(tmp_path, *targets):
    return [{"targets": t, "path": str(tmp_path / f"{i}.json")} for i, t in enumerate(targets)]


def test_forcing_notes_the_loss_and_forces(tmp_path):
    """Requests of different lengths leave the batch at different steps; a late step is harmless."""
    long, short = requests_of(tmp_path, [3, 1, 2], [7, 7])
    processor = forcing.TeacherForcing()
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, list[float]] = {"0": [], "1": []}
    for step in range(4):
        batch = [short, long] if step < 3 else [long]
        logits = torch.randn(len(batch), 16, generator=generator)
        forced = processor(logits.clone(), batch)
        for row, request in enumerate(batch):
            if step < len(request["targets"]):
                target = request["targets"][step]
                assert forced[row].argmax() == target
                expected[Path(request["path"]).stem].append(
                    torch.nn.functional.cross_entropy(logits[row], torch.tensor(target)).item()
                )
            else:
                assert torch.equal(forced[row], logits[row])
    for name, losses in expected.items():
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found == pytest.approx(losses, rel=1e-5)
    assert forcing.__name__ in pickle.dumps(forcing.TeacherForcing).decode(errors="replace")


@pytest.mark.sglang
def test_forcing_in_sglangs_sampler(tmp_path):
    """SGLang's own code finds the class, passes it the rows that asked, and writes them back."""
    from sglang.srt.layers.sampler import apply_custom_logit_processor
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

    requests = requests_of(tmp_path, [5, 6], [8, 9])
    entry = ProcessorEntry(
        processor=CustomLogitProcessor.from_str(forcing.serialized()),
        rows=[0, 2],
        indices=torch.tensor([0, 2]),
    )
    info = SamplingBatchInfo(
        temperatures=torch.ones(3, 1),
        top_ps=torch.ones(3),
        top_ks=torch.ones(3, dtype=torch.int32),
        min_ps=torch.zeros(3),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
        vocab_size=16,
        has_custom_logit_processor=True,
        custom_params=[requests[0], None, requests[1]],
        custom_logit_processor={1: entry},
        device="cpu",
    )
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(2):
        logits = torch.randn(3, 16, generator=generator)
        before = logits.clone()
        apply_custom_logit_processor(logits, info)
        assert torch.equal(logits[1], before[1])
        chosen.append(logits[[0, 2]].argmax(-1).tolist())
    assert chosen == [[5, 8], [6, 9]]
    assert len(json.loads((tmp_path / "1.json").read_text())) == 2


@pytest.mark.sglang
def test_sglangs_model_computes_the_same(tmp_path):
    """SGLang's DeepseekV3ForCausalLM loads every tensor, computes torch's logits, and takes a
    second checkpoint in place, absorbed weights too, as /update_weights_from_disk needs."""
    windows = np.random.default_rng(0).integers(0, 256, (4, WINDOW), np.uint8)
    for seed in (0, 1):
        make_checkpoint(tmp_path / f"seed{seed}", seed, windows)
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "sglang",
            tmp_path / "seed0",
            tmp_path / "seed1",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.strip().splitlines()[-2:]:
        found = json.loads(line)
        assert found["unloaded"] == []
        assert found["off"] < 1e-3 < found["largest"]
        assert found["in_place"]


TOOL = """
import json, os, subprocess, sys, urllib.request
PORT = 30000
FIXED = ["--port", str(PORT)]
def call(path, body=None, timeout=300):
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{{PORT}}{{path}}"
    request = urllib.request.Request(url, data, {{"Content-Type": "application/json"}})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()
def boot(name, words, args):
    log = open(os.path.join(os.environ["OUT"], name + ".log"), "w")
    command = [sys.executable, {file!r}, "serve", FIXED[1], args.model, *words]
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
"""


@pytest.fixture
def loss_run(tmp_path, monkeypatch):
    """Runs `bench.lm.loss` over the servers of this file; returns its status and its result."""
    windows = np.random.default_rng(0).integers(0, 255, (10, WINDOW), np.uint8)
    for name, seed in (("boot", 9), ("seed0", 0), ("seed1", 1)):
        make_checkpoint(tmp_path / name, seed, windows)
    tool = tmp_path / "tool.py"
    tool.write_text(textwrap.dedent(TOOL).format(file=__file__))

    def run(arms, port, *more):
        result = tmp_path / "lm.json"
        words = ["--tool", tool, "--json", result, "--arms", arms, "--port", port, *more]
        words += ["--models", f"{tmp_path / 'seed0'},{tmp_path / 'seed1'}"]
        words += ["--boot-model", tmp_path / "boot", "--prompt", PROMPT, "--forced", FORCED]
        monkeypatch.setenv("OUT", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["loss", *map(str, words), "--limit", "60"])
        monkeypatch.setattr(loss.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as status:
            loss.main()
        return status.value.code, json.loads(result.read_text())

    return run


def test_loss_of_servers(loss_run, capsys):
    """Both phases of both seeds agree with torch; a pool that rounds is told from one that does
    not; equal servers differ by nothing."""
    status, result = loss_run("stock_bf16=plain;stock_fp8=e4m3;fused=e4m3", PORT)
    assert status == 0, capsys.readouterr().out
    rows = {(row["arm"], row["phase"]): row for row in result["table"]}
    assert all(gate["ok"] and gate["nats_off"] < 1e-5 for gate in result["gates"])
    assert len(result["gates"]) == 4
    for phase in loss.PHASES:
        row = rows["fused", phase]
        assert row["seeds"] == [0, 1]
        assert row["tokens"] == 2 * 10 * (WINDOW - 1 if phase == "extend" else FORCED - 1)
        assert row["minus_stock_fp8"]["max_abs"] == 0
        assert row["minus_stock_bf16"]["max_abs"] > 1e-4
        assert row["minus_stock_bf16"]["se"] > 0
        expected = row["mean"] - rows["stock_bf16", phase]["mean"]
        assert row["minus_stock_bf16"]["mean"] == pytest.approx(expected, abs=1e-9)
    assert rows["torch_fp8_e4m3", "extend"]["mean"] == pytest.approx(
        rows["stock_fp8", "extend"]["mean"], abs=1e-4
    )
    assert [row["arm"] for row in result["rows"]].count("stock_bf16") == 2


def test_lost_arms_are_told(loss_run, capsys):
    """One server dies at boot, one forgets to force, one cannot update: its first seed is kept."""
    status, result = loss_run(
        "stock_bf16=plain;triton_fp8=dies;native=free;fused=stuck", PORT + 4000
    )
    assert status == 1
    errors = {row["arm"]: row["error"] for row in result["rows"] if "error" in row}
    assert "exited with 3: no GPU here" in errors["triton_fp8"]
    assert "not the forced bytes" in errors["native"]
    assert "HTTP Error 400" in errors["fused"]
    rows = {(row["arm"], row["phase"]): row for row in result["table"]}
    assert rows["fused", "decode"]["seeds"] == [0]
    assert rows["fused", "decode"]["minus_stock_bf16"]["max_abs"] == 0
    assert ("native", "extend") in rows
    assert ("native", "decode") not in rows
    assert "gate: " in capsys.readouterr().out


def test_a_failed_training_is_left_out(loss_run, tmp_path):
    (tmp_path / "seed0" / "meta.json").unlink()
    (tmp_path / "seed0" / "failed").touch()
    status, result = loss_run("stock_bf16=plain", PORT + 6000)
    assert status == 1
    assert {row["seeds"][0] for row in result["table"]} == {1}
    assert any("the training failed" in row.get("error", "") for row in result["rows"])


def test_a_red_gate_fails(tmp_path):
    results = loss.Results(tmp_path / "x.json", {})
    flat = np.ones((2, 5))
    results.add("torch_bf16", 0, {"extend": flat, "extend_same": flat})
    results.add("stock_bf16", 0, {"extend": flat + 0.02, "extend_same": flat, "decode": flat})
    assert [gate["ok"] for gate in results.gates()] == [False, True]


def test_every_arm_reads_what_its_name_says():
    arms = loss.parse_arms("")
    assert [("fp8" in " ".join(w)) for w in arms.values()] == [False] + [True] * 7
    for words in arms.values():
        assert "" not in words
        assert "--enable-custom-logit-processor" in words
    with pytest.raises(SystemExit, match="NAME must be one of stock_bf16"):
        loss.parse_arms("fussed")


def serve(port, directory, *words):
    """/health, /generate with logprobs or with a processor, /update_weights_from_disk."""
    if "dies" in words:
        print("no GPU here", flush=True)
        sys.exit(3)
    store = train.stored_as(torch.float8_e4m3fn) if "e4m3" in words else None
    state = SimpleNamespace(model=load(directory))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def reply(self, answer, code=200):
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.reply({})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/update_weights_from_disk":
                stuck = "stuck" in words
                if not stuck:
                    state.model = load(body["model_path"])
                self.reply({"success": not stuck, "message": "no"}, 400 if stuck else 200)
                return
            tokens = torch.tensor(body["input_ids"])
            with torch.inference_mode():
                reply = self.extend if body.get("return_logprob") else self.decode
                self.reply(reply(body, tokens))

        def extend(self, body, tokens):
            losses = train.token_losses(state.model, tokens, store=store)
            return [
                {
                    "meta_info": {
                        "input_token_logprobs": [
                            [None, row[0], None],
                            *([-x, token, None] for x, token in zip(found, row[1:])),
                        ]
                    }
                }
                for found, row in zip(losses.tolist(), body["input_ids"])
            ]

        def decode(self, body, tokens):
            processor = pickle.loads(
                bytes.fromhex(json.loads(body["custom_logit_processor"])["callable"])
            )()
            params = [p["custom_params"] for p in body["sampling_params"]]
            length, new = tokens.shape[1], body["sampling_params"][0]["max_new_tokens"]
            # one step more than asked for, as the overlap scheduler runs
            for _ in range(new + 1):
                logits = state.model(tokens, store=store)[:, -1]
                forced = processor(logits, params)
                chosen = (logits if "free" in words else forced).argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, chosen], dim=1)
            return [{"output_ids": row[length : length + new]} for row in tokens.tolist()]

    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


def compare_with_sglang(*directories):
    """One JSON line a checkpoint, all of them through one model of SGLang's."""
    from contract.scene import ref_attention
    from safetensors.torch import load_file
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding import base, factory
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_methods
    from sglang.srt.utils.hf_transformers_utils import get_config
    from sglang.test.layer_ut_utils import init_single_process_dist

    def get_rope(*args, device=None, **kwargs):
        """The rope that a GPU gets, in torch: SGLang's own one for the CPU is yarn's only."""
        rope = factory.get_rope(*args, **kwargs)
        rope._forward_method = rope.forward_native
        return rope

    def attend(self, ckv_q, ckv, value, batch, save_kv_cache=True, q_rope=None, k_rope=None):
        """Causal attention of one request, which the kernels do elsewhere."""
        q, rows = torch.cat([ckv_q, q_rope], -1).double(), torch.cat([ckv, k_rope], -1).double()
        out, _ = ref_attention(
            q, rows[:, 0], ckv=self.v_head_dim, sm_scale=self.scaling, causal=True
        )
        return out.to(ckv_q.dtype).flatten(1)

    def absorbed(self, batch):
        self.current_attention_backend = "flashinfer"
        return forward_methods.AttnForwardMethod.MLA

    init_single_process_dist(master_port=PORT + 8000)
    base._is_cpu = True
    deepseek_v2.get_rope_wrapper = get_rope
    deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method = absorbed
    RadixAttention.forward = attend
    theirs = deepseek_v2.DeepseekV3ForCausalLM(get_config(directories[0], trust_remote_code=False))
    for weight in theirs.parameters():
        weight.data.fill_(math.nan)
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=tokens,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([len(tokens)]),
        out_cache_loc=torch.arange(len(tokens)),
        seq_lens_sum=len(tokens),
    )
    places = set()
    for directory in directories:
        theirs.load_weights(list(load_file(Path(directory) / "model.safetensors").items()))
        places.add(theirs.model.layers[0].self_attn.w_kc.data_ptr())
        with torch.no_grad():
            hidden = theirs.model(tokens, torch.arange(len(tokens)), batch)
            logits = hidden @ theirs.lm_head.weight.T
            mine = load(directory)(tokens[None])[0]
        unloaded = [name for name, weight in theirs.named_parameters() if weight.isnan().any()]
        print(
            json.dumps(
                {
                    "unloaded": unloaded,
                    "off": (logits - mine).abs().max().item(),
                    "largest": mine.abs().max().item(),
                    # a captured graph goes on reading where it read
                    "in_place": len(places) == 1,
                }
            )
        )


if __name__ == "__main__":
    {"serve": serve, "sglang": compare_with_sglang}[sys.argv[1]](*sys.argv[2:])
