#!/usr/bin/env bash
# Two H200s: speculation on the second while tests run on the first, then two-GPU servers. See README.md.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
(
  export CUDA_VISIBLE_DEVICES=1
  python3 -m bench.serve.make_nextn /tmp/nextn --layers 61
  part nextn 210 python3 -m bench.serve.spec_ab --tool "$TOOL" --port 20000 --pool 131072 --boot 180 \
    nextn-eager nextn-graph
) &
NEXTN=$!
TEST="python3 -m pytest -q --require-gpu -p no:cacheprovider --maxfail=20 --tb=short"
for file in test_kit_gpu test_state_machine_gpu; do
  CUDA_VISIBLE_DEVICES=0 part $file 100 $TEST tests/gpu/$file.py
done
wait $NEXTN
at nextn
grep -v '^{' "$OUT/nextn.log" | tail -n 20
part parallel 250 python3 -m bench.serve.spec_ab --tool "$TOOL" --port 24000 --pool 131072 --boot 200 one tp2 dp2 dcp2
grep -v '^{' "$OUT/parallel.log" | tail -n 24
at parallel
pack
