#!/usr/bin/env bash
# Two H200s, 400 s: what has to be timed. Kernels have the first GPU alone, servers the second.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
(
  export CUDA_VISIBLE_DEVICES=1 ROOM=--mem-fraction-static,0.95
  part serve 250 python3 -m bench.serve_overlap --tool "$TOOL" --boot 170 --port 20000 \
    stock="$STOCK,$ROOM" auto="$OURS,$ROOM" bf16="--attention-backend,flashinfer,$ROOM" \
    flashmla="--attention-backend,flashmla,--kv-cache-dtype,fp8_e4m3,--page-size,64,$ROOM"
  at serve
  cut -c1-330 "$OUT/serve.log"
  [ -d /tmp/nextn ] || python3 -m bench.serve.make_nextn /tmp/nextn
  part nextn 200 python3 -m bench.serve.spec_ab --tool "$TOOL" --boot 150 --port 21000 nextn-three
  at nextn
  grep -v '^{' "$OUT/nextn.log"
) &
export CUDA_VISIBLE_DEVICES=0
CANDIDATE=bench.gather_candidate:attend part kernel_gather 60 python3 ~/p/tools/kernel_ab.py
CANDIDATE=bench.decode_candidate:decode part kernel_fused 60 python3 ~/p/tools/kernel_ab.py
VARIANTS=1 part cast 40 python3 -m bench.gather_candidate
at kernels
part calibrate 130 python3 -m sglang_fp8mla.cli calibrate --out "$OUT/profile.json"
at calibrate
PATHS=stock,gather_cast,native,fused,bf16,sglang_triton,flashmla
part bench 80 python3 -m sglang_fp8mla.cli bench --path $PATHS --json "$OUT/bench.json"
part sweep 80 python3 -m sglang_fp8mla.cli bench --sweep length --sweep batch --path $PATHS --repeat 10 \
  --json "$OUT/sweep.json"
at bench
TEST="python3 -m pytest -q --require-gpu -p no:cacheprovider --tb=short"
part cost 60 $TEST tests/gpu/test_gather_cast_gpu.py
wait
pack
