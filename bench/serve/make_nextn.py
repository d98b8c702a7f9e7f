"""Write an MLA checkpoint whose own NextN layer guesses its tokens about half of the time.

    python -m bench.serve.make_nextn DIR [--layers 61]

Beside it, for the feature matrix: DIR-eagle3 and DIR-dflash (configs of MHA drafts), DIR-lora (an
adapter), DIR-sarvam (the same weights under an architecture that pdmux can split), DIR-mha (a model
without MLA).

Dummy weights never accept a drafted token, and their tokens hardly depend on attention: two models
with different attention gave the same ones on the H200. Here the target's next token is
`next_token(t)` unless attention and MLP push the state to another one, which they are scaled to do
in a part of the contexts; the NextN layer guesses `next_token(t)` as well, by the embedding, with
attention of its own that now and then changes its mind. In a float32 model of 6 layers on the CPU,
with a calmer draft, 3 of 4 guesses were accepted; and over 512 random tokens, rounding attention's
output to bf16 changed 2 % of the next tokens, losing one key a query 13 %, reading keys one row
off 31 %, no attention at all 25 %. One seed gives one checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from sglang_fp8mla.serving import mla_config

VOCAB, HIDDEN, HEADS = 32000, 2048, 16
Q_RANK, CKV, KPE, NOPE, VALUE = 1536, 512, 64, 128, 128
DENSE, EXPERT, EXPERTS = 4096, 256, 8
# logits of a state s * E[t] + noise * N(0, 1): s * HIDDEN against noise * 4.2 * sqrt(HIDDEN), the
# largest of VOCAB draws. They are level at noise / s = 10.8; a little less leaves `next_token` in
# front; attention averages over keys and gives about a quarter to a half of its figure
NOISE_MLP, NOISE_ATTENTION, NOISE_DRAFT = 8.5, 4.5, 13.0
LORA_RANK, MHA_LAYERS = 16, 4


def next_token(token: int) -> int:
    """The token that follows when nothing pushes: one long cycle through the vocabulary."""
    return (token + 1237) % VOCAB


def make_config(layers: int) -> dict[str, Any]:
    """config.json: DeepSeek-V3's attention at 16 heads, dense layers, one NextN layer."""
    return mla_config(layers, HEADS) | {
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "kv_lora_rank": CKV,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": KPE,
        "v_head_dim": VALUE,
        "moe_intermediate_size": EXPERT,
        "n_routed_experts": EXPERTS,
        "routed_scaling_factor": 1.0,
        "vocab_size": VOCAB,
    }


class Maker:
    """Draws the tensors in a fixed order, on the GPU where there is one."""

    def __init__(self, seed: int, device: str) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def linear(self, out: int, into: int, gain: float = 1.0) -> Any:
        """[out, into] that maps unit variance to a standard deviation of `gain`."""
        drawn = self._torch.randn(
            out, into, generator=self._generator, device=self._device, dtype=self._torch.float32
        )
        return (drawn * gain * into**-0.5).bfloat16()

    def ones(self, size: int) -> Any:
        return self._torch.ones(size, dtype=self._torch.bfloat16, device=self._device)

    def attention(self, prefix: str, noise: float) -> Iterator[tuple[str, Any]]:
        yield f"{prefix}.input_layernorm.weight", self.ones(HIDDEN)
        at = f"{prefix}.self_attn"
        yield f"{at}.q_a_proj.weight", self.linear(Q_RANK, HIDDEN)
        yield f"{at}.q_a_layernorm.weight", self.ones(Q_RANK)
        # times 3: logits that differ enough for a few keys to carry most of the weight
        yield f"{at}.q_b_proj.weight", self.linear(HEADS * (NOPE + KPE), Q_RANK, 3.0)
        yield f"{at}.kv_a_proj_with_mqa.weight", self.linear(CKV + KPE, HIDDEN)
        yield f"{at}.kv_a_layernorm.weight", self.ones(CKV)
        yield f"{at}.kv_b_proj.weight", self.linear(HEADS * (NOPE + VALUE), CKV)
        yield f"{at}.o_proj.weight", self.linear(HIDDEN, HEADS * VALUE, noise)
        yield f"{prefix}.post_attention_layernorm.weight", self.ones(HIDDEN)

    def mlp(self, prefix: str, width: int, noise: float) -> Iterator[tuple[str, Any]]:
        yield f"{prefix}.gate_proj.weight", self.linear(width, HIDDEN)
        yield f"{prefix}.up_proj.weight", self.linear(width, HIDDEN)
        # silu(x) * y of two unit normals has a standard deviation of 0.6
        yield f"{prefix}.down_proj.weight", self.linear(HIDDEN, width, noise / 0.6)

    def ends(self) -> list[tuple[str, Any]]:
        """[VOCAB, HIDDEN] embedding and head, whose row of `next_token(t)` is t's embedding."""
        embed = self.linear(VOCAB, HIDDEN, HIDDEN**0.5)
        follower = self._torch.tensor([next_token(t) for t in range(VOCAB)], device=self._device)
        head = self._torch.empty_like(embed)
        head[follower] = embed
        return [
            ("model.embed_tokens.weight", embed),
            ("lm_head.weight", head * HIDDEN**-0.5),
            ("model.norm.weight", self.ones(HIDDEN)),
        ]


def make_tensors(
    layers: int, seed: int = 1, device: str = "cpu"
) -> Iterator[list[tuple[str, Any]]]:
    """The checkpoint, a list of named tensors a file."""
    import torch

    maker = Maker(seed, device)
    ends = maker.ends()
    yield ends
    embed, head = ends[0][1], ends[1][1]
    share = layers**-0.5
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield [
            *maker.attention(prefix, NOISE_ATTENTION * share),
            *maker.mlp(f"{prefix}.mlp", DENSE, NOISE_MLP * share),
        ]
    prefix = f"model.layers.{layers}"
    choose = torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16, device=device)
    choose[:, :HIDDEN] = torch.eye(HIDDEN, dtype=torch.bfloat16, device=device)
    experts = [f"{prefix}.mlp.shared_experts"]
    experts += [f"{prefix}.mlp.experts.{expert}" for expert in range(EXPERTS)]
    yield [
        (f"{prefix}.enorm.weight", maker.ones(HIDDEN)),
        (f"{prefix}.hnorm.weight", maker.ones(HIDDEN)),
        (f"{prefix}.eh_proj.weight", choose),
        (f"{prefix}.shared_head.norm.weight", maker.ones(HIDDEN)),
        (f"{prefix}.shared_head.head.weight", head),
        (f"{prefix}.embed_tokens.weight", embed),
        *maker.attention(prefix, NOISE_DRAFT),
        (f"{prefix}.mlp.gate.weight", maker.linear(EXPERTS, HIDDEN)),
        (f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS, device=device)),
        *(pair for expert in experts for pair in maker.mlp(expert, EXPERT, 0.5)),
    ]


def make_mha(seed: int = 3, device: str = "cpu") -> Iterator[list[tuple[str, Any]]]:
    """A Llama of MHA_LAYERS layers, its tokens as dependent on attention as the checkpoint's."""
    maker = Maker(seed, device)
    yield maker.ends()
    share = MHA_LAYERS**-0.5
    for layer in range(MHA_LAYERS):
        prefix = f"model.layers.{layer}"
        at = f"{prefix}.self_attn"
        yield [
            (f"{prefix}.input_layernorm.weight", maker.ones(HIDDEN)),
            (f"{at}.q_proj.weight", maker.linear(HIDDEN, HIDDEN, 3.0)),
            (f"{at}.k_proj.weight", maker.linear(HIDDEN, HIDDEN)),
            (f"{at}.v_proj.weight", maker.linear(HIDDEN, HIDDEN)),
            (f"{at}.o_proj.weight", maker.linear(HIDDEN, HIDDEN, NOISE_ATTENTION * share)),
            (f"{prefix}.post_attention_layernorm.weight", maker.ones(HIDDEN)),
            *maker.mlp(f"{prefix}.mlp", DENSE, NOISE_MLP * share),
        ]


def make_adapter(layers: int, seed: int = 2, device: str = "cpu") -> Iterator[tuple[str, Any]]:
    """A LoRA adapter, half as strong as the weights that it is added to.

    `kv_b_proj` is the projection that absorbed MLA never calls: SGLang adds the adapter's share to
    the query before attention and to its output after.
    """
    maker = Maker(seed, device)
    for layer in range(layers):
        at = f"base_model.model.model.layers.{layer}.self_attn"
        for name, out, into, gain in (
            ("kv_b_proj", HEADS * (NOPE + VALUE), CKV, 1.0),
            ("o_proj", HIDDEN, HEADS * VALUE, NOISE_ATTENTION * layers**-0.5),
        ):
            yield f"{at}.{name}.lora_A.weight", maker.linear(LORA_RANK, into)
            yield f"{at}.{name}.lora_B.weight", maker.linear(out, LORA_RANK, 0.5 * gain)


def write_tokenizer(directory: str) -> None:
    """Some tokenizer, a word a token, for programs that will not start without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(os.path.join(directory, "tokenizer.json"))
    with open(os.path.join(directory, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "1"}, file)


def mha_config(layers: int) -> dict[str, Any]:
    """What the MHA models share, under the field names of a Llama."""
    return {
        **{"hidden_size": HIDDEN, "intermediate_size": DENSE, "num_attention_heads": HEADS},
        **{"num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS, "num_hidden_layers": layers},
        **{"vocab_size": VOCAB, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6},
        **{"hidden_act": "silu", "rope_theta": 10000, "torch_dtype": "bfloat16"},
        **{"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False},
    }


def make_relatives(layers: int) -> dict[str, dict[str, Any]]:
    """config.json of every DIR-NAME that has one."""
    features = {"block_size": 4, "target_layer_ids": [1, layers // 2, layers - 2]}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {
        "eagle3": {
            **mha_config(1),
            **llama,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCAB,
        },
        "dflash": {
            **mha_config(1),
            **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
            "num_target_layers": layers,
            "dflash_config": {**features, "mask_token_id": 2},
        },
        # of the MLA models in SGLang 0.5.23 only Sarvam's has `forward_split_prefill`, which pdmux
        # calls; its tensors have DeepSeek's names and shapes
        "sarvam": {
            **make_config(layers),
            **{"architectures": ["SarvamMLAForCausalLM"], "num_experts": EXPERTS},
        },
        "mha": {**mha_config(MHA_LAYERS), **llama},
    }


def write_json(path: str, value: object) -> None:
    with open(path, "w") as file:
        json.dump(value, file, indent=1)


def write_relatives(directory: str, layers: int) -> None:
    """Configs and tokenizers of DIR-NAME, and the rest but for weights."""
    for name, config in make_relatives(layers).items():
        os.makedirs(f"{directory}-{name}", exist_ok=True)
        write_json(f"{directory}-{name}/config.json", config)
        write_tokenizer(f"{directory}-{name}")
    # JSON is YAML. Three groups are the fewest: prefill alone, both, decode alone. A prompt of
    # 4,096 tokens goes through one layer at a time
    write_json(
        f"{directory}-sarvam/pdmux.yaml", {"sm_group_num": 3, "split_forward_token_budget": 4096}
    )
    os.makedirs(f"{directory}-lora", exist_ok=True)
    write_json(
        f"{directory}-lora/adapter_config.json",
        {
            **{"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "bias": "none"},
            **{"target_modules": ["kv_b_proj", "o_proj"], "task_type": "CAUSAL_LM"},
        },
    )


def write_weights(directory: str, files: Iterable[list[tuple[str, Any]]]) -> int:
    """A safetensors file for each list of named tensors, and their index; returns bytes."""
    from safetensors.torch import save_file

    os.makedirs(directory, exist_ok=True)
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files):
        name = f"model-{number:05d}.safetensors"
        # contiguous and apart: the head and the embedding are written twice
        held = {key: tensor.cpu().clone().contiguous() for key, tensor in tensors}
        save_file(held, os.path.join(directory, name), metadata={"format": "pt"})
        index.update(dict.fromkeys(held, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    path = os.path.join(directory, "model.safetensors.index.json")
    write_json(path, {"metadata": {"total_size": total}, "weight_map": index})
    return total


def write(directory: str, layers: int, seed: int) -> int:
    """The checkpoint and its relatives; returns bytes of the checkpoint's weights."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = write_weights(directory, make_tensors(layers, seed, device))
    write_json(os.path.join(directory, "config.json"), make_config(layers))
    write_tokenizer(directory)
    write_relatives(directory, layers)
    write_weights(f"{directory}-mha", make_mha(device=device))
    adapter = {name: tensor.cpu() for name, tensor in make_adapter(layers, device=device)}
    save_file(adapter, f"{directory}-lora/adapter_model.safetensors", metadata={"format": "pt"})
    for name in os.listdir(directory):
        link = f"{directory}-sarvam/{name}"
        if name.startswith("model") and not os.path.lexists(link):
            os.symlink(os.path.abspath(os.path.join(directory, name)), link)
    return total


def main() -> None:
    """Parse arguments and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    total = write(options.directory, options.layers, options.seed)
    print(f"{options.directory}: {options.layers} layers, {total / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
