"""The arms of the recorded server runs (`bench/serve/arms.py`) start with the arguments they mean.

A wrong flag would cost minutes of a borrowed GPU; SGLang's own resolution finds it here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from contract.sglang_wheels import install_plugin
from contract.test_integration import resolve_lines

from bench.serve import arms, make_nextn
from sglang_fp8mla import BACKEND_NAME

pytestmark = pytest.mark.sglang

# the fixed flags of serve_ab.py that matter here
FIXED = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--sampling-backend", "pytorch"),
    *("--cuda-graph-max-bs-decode", "8", "--disable-radix-cache", "--disable-prefill-cuda-graph"),
    *("--flashinfer-mla-disable-ragged", "--mem-fraction-static", "0.8", "--random-seed", "1"),
    *("--max-total-tokens", "131072", "--device", "cuda", "--port", "30000"),
]


def test_every_arm_resolves_as_its_groups_stock(tmp_path: Path) -> None:
    """Same arguments within a group, but for the name; and what each set is for is on."""
    model = tmp_path / "nextn"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(make_nextn.make_config(61)))
    make_nextn.write_drafts(str(model), 61)
    words = arms.expand(list(arms.SETS), str(model))
    names, argvs = [], []
    for arm in words:
        name, _, flags = arm.partition("=")
        # what serve_ab.py and serve_overlap.py take out: environment, model, flags to drop
        cli = [word for word in flags.split(",") if ":=" not in word and word[0] not in "@!"]
        dropped = [f"--{word[1:]}" for word in flags.split(",") if word[0] == "!"]
        fixed = [word for word in FIXED if word not in dropped]
        names.append(name)
        argvs.append(["--model-path", str(model), *fixed, *cli])
    results = dict(zip(names, resolve_lines(argvs, install_plugin(tmp_path / "site")), strict=True))
    assert len(results) == len(words), "arm names repeat"
    for name, result in results.items():
        assert "fields" in result, f"{name}: {result.get('at') or result['log']}"
        stock = results[f"{name.partition('.')[0]}.stock"]["fields"]
        # one of the three, for an arm of one phase alone
        expected = dict(stock)
        if not name.endswith(".stock"):
            swapped = [
                key
                for key, value in stock.items()
                if key.endswith("attention_backend") and value == "'flashinfer'"
            ]
            assert swapped, name
            expected |= dict.fromkeys(swapped, repr(BACKEND_NAME))
        assert result["fields"] == expected, name
    assert results["dummy.exact"]["fields"]["speculative_num_draft_tokens"] == "4"
    assert results["dummy.exact"]["fields"]["load_format"] == "'dummy'"
    assert results["nextn1.exact"]["fields"]["load_format"] == "'auto'"
    assert results["nextn1.exact"]["fields"]["speculative_num_steps"] == "1"
    assert results["nextn3.auto"]["fields"]["speculative_num_steps"] == "3"
    assert results["dp2.exact"]["fields"]["attn_dp_size"] == "2"
    assert results["dcp2.exact"]["fields"]["dcp_size"] == "2"
