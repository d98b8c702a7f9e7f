#!/usr/bin/env bash
# One H200, 400 s: what has to be timed. Kernels have the GPU alone first, then servers. See README.md beside it.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
export CUDA_VISIBLE_DEVICES=0
CANDIDATE=bench.gather_candidate:attend part kernel_gather 60 python3 ~/p/tools/kernel_ab.py
CANDIDATE=bench.decode_candidate:decode part kernel_fused 60 python3 ~/p/tools/kernel_ab.py
part cast 30 python3 -m bench.gather_candidate
part cast_turns 50 python3 -m bench.cast_turns ~/p/tools/kernel_ab.py --json "$OUT/cast_turns.json"
part cast_lab 60 python3 -m bench.cast_lab ~/p/tools/kernel_ab.py --attention --json "$OUT/cast_lab.json"
at kernels
part calibrate 110 python3 -m sglang_fp8mla.cli calibrate --heads 8,16,64,128 --batches 1,8,64 \
  --lengths 1024,16384 --repeat 6 --out "$OUT/profile.json"
at calibrate
PATHS=stock,gather_cast,native,fused,bf16,sglang_triton,flashmla
part bench 80 python3 -m sglang_fp8mla.cli bench --path $PATHS --json "$OUT/bench.json"
at bench
# servers need 35 s before they touch the GPU
ROOM=--mem-fraction-static,0.95
part serve 230 python3 -m bench.serve_overlap --tool "$TOOL" --boot 160 --port 20000 \
  stock="$STOCK,$ROOM" auto="$OURS,$ROOM" bf16="--attention-backend,flashinfer,$ROOM" \
  flashmla="--attention-backend,flashmla,--kv-cache-dtype,fp8_e4m3,--page-size,64,$ROOM" &
part sweep 33 python3 -m sglang_fp8mla.cli bench --sweep length --path $PATHS --repeat 10 --json "$OUT/sweep.json"
at sweep
wait
at serve
cut -c1-330 "$OUT/serve.log"
for _ in $(seq ${WAIT_LOAD:-0}); do [ -e /tmp/load/DONE ] && break || sleep 1; done
cp -r /tmp/load /tmp/load.log "$OUT/" 2> /dev/null
tail -n 40 /tmp/load.log | cut -c1-220
pack
