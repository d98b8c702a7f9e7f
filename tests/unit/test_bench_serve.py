"""`bench/serve`: what a recorded server run asks of a server, and what it makes of the answers."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.serve import arms, spec_ab


class Server:
    """A server of the tool's: counts its calls, answers with the request's own tokens."""

    def __init__(self, ends_with: str = "") -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._ends_with = ends_with

    def boot(self, name: str, _words: list[str], _options: Any) -> subprocess.Popen[bytes]:
        command = "exit 1" if self._ends_with else "exec sleep 60"
        Path(spec_ab.in_out(f"{name}.log")).write_text(self._ends_with)
        server = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
        if self._ends_with:
            server.wait()
        return server

    def call(self, path: str, body: Any = None, timeout: float = 300) -> bytes:
        self.calls.append((path, body))
        if path != "/generate":
            return b""
        new = body["sampling_params"]["max_new_tokens"]
        prompts = body["input_ids"]
        adapters = body.get("lora_path") or [None] * len(prompts)
        info = {"cached_tokens_details": {"device": 1, "host": 2, "storage_backend": None}}
        return json.dumps(
            [
                {"output_ids": [7 if adapter else 6] * new, "meta_info": info}
                for _, adapter in zip(prompts, adapters, strict=True)
            ]
        ).encode()


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(spec_ab, "WORKLOADS", ((1, 64, 4), (3, 128, 2)))
    monkeypatch.setattr(spec_ab.time, "sleep", lambda _: None)
    return tmp_path


def run(server: Server, words: str, name: str = "x.stock") -> dict[str, Any]:
    return spec_ab.measure(server, name, words.split(), argparse.Namespace(boot=5))


def test_lora_arms_mix_requests_with_and_without_the_adapter() -> None:
    row = run(server := Server(), "--lora-paths adapter=/nowhere")
    asked = [body.get("lora_path") for path, body in server.calls if path == "/generate"]
    assert ["adapter", None, "adapter"] in asked
    assert None in asked
    # one of the three has no adapter anyway
    assert row["3x128"]["without_adapter"] == 2
    assert row["1x64"]["without_adapter"] == 0


@pytest.mark.parametrize(
    ("words", "tags"),
    [
        ("--enable-memory-saver", {"tags": ["kv_cache"]}),
        ("--enable-memory-saver --enable-weights-cpu-backup", {}),
    ],
)
def test_sleepers_sleep_before_each_run(words: str, tags: dict[str, Any]) -> None:
    run(server := Server(), words)
    slept = [body for path, body in server.calls if path == "/release_memory_occupation"]
    assert slept == [tags] * 4


def test_evicting_prompts_pass_the_pool_and_share_nothing() -> None:
    row = run(server := Server(), "--hicache-ratio 8")
    bodies = [body["input_ids"] for path, body in server.calls if path == "/generate"]
    others = [prompts for prompts in bodies if len(prompts[0]) > 7000]
    assert len(others) == 2 * 2 * len(spec_ab.WORKLOADS)
    assert sum(len(prompt) for prompts in others[:2] for prompt in prompts) > 16384 * 1.5
    starts = {tuple(prompt[:8]) for prompts in bodies for prompt in prompts}
    mine = {tuple(p[:8]) for p in spec_ab.make_prompts(3, 128)}
    assert len(starts - mine) == 4
    assert row["3x128"]["cached"] == {"device": 3, "host": 6}


def test_an_arm_that_dies_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception of the log, without rank and time; a group may end alike where it is to."""
    log = (
        "[rank0]: ValueError: first\nTraceback\n[rank0]: ValueError: no such path\n[2026] sigquit\n"
    )
    rows = [run(Server(log), "", name) for name in ("x.stock", "x.exact")]
    assert [row["why"] for row in rows] == ["ValueError: no such path"] * 2
    assert not spec_ab.compare(rows)
    assert "ended as all of its group: ValueError: no such path" in capsys.readouterr().out
    monkeypatch.setattr(spec_ab, "REFUSED", {"x"})
    assert spec_ab.compare(rows)
    rows[1]["why"] = "ValueError: ours"
    assert not spec_ab.compare(rows)
    assert not spec_ab.compare([{"arm": "x.stock", "error": "no /health", "why": ""}])


def test_compare_holds_exact_arms_to_stock_where_stock_repeats() -> None:
    rows = [run(Server(), "", name) for name in ("x.stock", "x.exact", "x.gather_cast")]
    assert spec_ab.compare(rows)
    rows[2]["3x128"]["ids"][0][1] = 9
    assert spec_ab.compare(rows)
    rows[1]["3x128"]["ids"][0][1] = 9
    assert not spec_ab.compare(rows)
    rows[0]["3x128"]["repeats"] -= 1
    assert spec_ab.compare(rows)


def test_sets_boot_at_most_ten_servers() -> None:
    groups = {arm.partition(".")[0] for members in arms.SETS.values() for arm in members}
    assert groups >= arms.REFUSED
    for name, members in arms.SETS.items():
        assert len(members) <= 10, name
        assert len({arm.partition("=")[0] for arm in members}) == len(members)
