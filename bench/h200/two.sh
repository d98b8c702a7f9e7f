#!/usr/bin/env bash
# Two H200s: NextN on the second while the kit runs on the first, then two-GPU servers. See README.md.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
AB="python3 -m bench.serve.spec_ab --tool $TOOL"
python3 -m bench.serve.make_nextn /tmp/nextn
CUDA_VISIBLE_DEVICES=1 part nextn 230 $AB --boot 150 nextn-one nextn-three &
NEXTN=$!
CUDA_VISIBLE_DEVICES=0 part kit 130 bash tests/gpu/kit.sh
CUDA_VISIBLE_DEVICES=0 part state 100 python3 -m pytest -q --require-gpu -p no:cacheprovider \
  --maxfail=4 --tb=short tests/gpu/test_state_machine_gpu.py
wait $NEXTN
at nextn
grep -v '^{' "$OUT/nextn.log" | tail -n 20
# DP attention first: stock's run of it was cut once. SGLang picks ports itself from 22000 on
part parallel 250 $AB --port 18000 --boot 200 dp2 dcp2 tp2 one
at parallel
grep -v '^{' "$OUT/parallel.log" | tail -n 24
pack
