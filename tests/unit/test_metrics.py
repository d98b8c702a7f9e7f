"""Counters reach prometheus's multiprocess exposition, as SGLang's `/metrics` serves it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
ROOT = Path(__file__).resolve().parents[2]

_SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sglang_fp8mla.metrics import StepCounters

for _ in range(2):  # a target and a draft backend in one process
    counters = StepCounters(values_per_token=61 * 576)
    counters.count("decode", "fused", 1000)
counters.count("extend", "gather_cast", 10)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_counters_are_exported(tmp_path):
    environ = dict(os.environ, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", _SCRAPE], capture_output=True, text=True, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stderr
    found = dict(
        line.rsplit(" ", 1) for line in done.stdout.splitlines() if line and line[0] != "#"
    )
    decode = '{path="fused",phase="decode"}'
    extend = '{path="gather_cast",phase="extend"}'
    values = 61 * 576
    assert {name: float(value) for name, value in found.items()} == {
        f"sglang_fp8mla:steps_total{decode}": 2,
        f"sglang_fp8mla:kv_tokens_total{decode}": 2000,
        f"sglang_fp8mla:kv_bytes_total{decode}": 2000 * values,
        f"sglang_fp8mla:steps_total{extend}": 1,
        f"sglang_fp8mla:kv_tokens_total{extend}": 10,
        f"sglang_fp8mla:kv_bytes_total{extend}": 10 * values * 5,
    }
