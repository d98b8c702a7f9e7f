#!/usr/bin/env bash
# One H200, about 160 s: our kernels under compute-sanitizer's four tools. See README.md beside it.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
# 40 processes in two waves; a process waits for the GPU as long as it computes
part sanitize 200 python3 -m bench.sanitize --jobs 20 --limit 70 --deadline 185 \
  --json "$OUT/sanitize.json"
at sanitize
cut -c1-240 "$OUT/sanitize.log"
pack
