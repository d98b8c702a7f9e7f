#!/usr/bin/env bash
# One H200: default flags, all GPU tests, then what wants the GPU alone. See README.md beside it.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
part default 300 python3 -m bench.serve_overlap --tool "$TOOL" --boot 240 --port 20000 \
  --without disable-prefill-cuda-graph,disable-radix-cache stock="$STOCK" auto="$OURS" &
SERVERS=$!
TEST="python3 -m pytest -q --require-gpu -p no:cacheprovider --maxfail=20 --tb=short"
for file in test_mla_decode_gpu test_gather_cast_gpu test_cases_gpu; do part $file 120 $TEST tests/gpu/$file.py; done
wait $SERVERS
at servers
cut -c1-300 "$OUT/default.log"
CANDIDATE=bench.gather_candidate:attend part kernel_gather 60 python3 ~/p/tools/kernel_ab.py
CANDIDATE=bench.decode_candidate:decode part kernel_fused 60 python3 ~/p/tools/kernel_ab.py
at kernel_ab
VARIANTS=1 part cast 40 python3 -m bench.gather_candidate
part calibrate 70 python3 -m sglang_fp8mla.cli calibrate --heads 8,16,64,128 --batches 1,8,64 \
  --lengths 1024,16384 --repeat 6 --out "$OUT/profile.json"
PATHS=stock,gather_cast,native,fused,bf16,sglang_triton,flashmla
part bench 60 python3 -m sglang_fp8mla.cli bench --path $PATHS --json "$OUT/bench.json"
part sweep 60 python3 -m sglang_fp8mla.cli bench --sweep length --sweep batch --path $PATHS --repeat 10 \
  --json "$OUT/sweep.json"
at bench
pack
