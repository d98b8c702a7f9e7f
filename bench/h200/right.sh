#!/usr/bin/env bash
# Two H200s, 510 s and up to a minute of packing: everything whose answer matters and whose time does not. See README.md beside it.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
export NEXTN=/tmp/nextn8
python3 -m bench.serve.make_nextn $NEXTN --layers 8
# ten minutes of load and the faults, on the second GPU; they outlive this command (results in /tmp/load)
CUDA_VISIBLE_DEVICES=1 setsid bash bench/h200/load.sh ${LOAD:-600} /tmp/load > /tmp/load.log 2>&1 < /dev/null &
AB="python3 -m bench.serve.spec_ab --tool $TOOL"
TEST="python3 -m pytest -q --require-gpu -p no:cacheprovider --maxfail=20 --tb=short"
export CUDA_VISIBLE_DEVICES=0
(
  part kit 150 bash tests/gpu/kit.sh
  tail -n 30 "$OUT/kit/kit.md"
  part test_cases_gpu 120 $TEST tests/gpu/test_cases_gpu.py
  part test_state_machine_gpu 230 $TEST -s tests/gpu/test_state_machine_gpu.py
  at tests
) &
part numerics 350 python3 bench/numerics.py --seeds 2 --json "$OUT/numerics.json" &
(
  sleep 70
  # the offline door, whose tokens must be stock's, and one that parses its arguments before plugins load
  part engine 240 python3 -m bench.serve.engine $NEXTN &
  part one_batch 200 python3 -m sglang_fp8mla.run sglang.benchmark.one_batch --model-path $NEXTN \
    --attention-backend flashinfer_mla_fp8 --kv-cache-dtype fp8_e4m3 \
    --max-total-tokens 65536 --flashinfer-mla-disable-ragged --disable-prefill-cuda-graph \
    --sampling-backend pytorch --cuda-graph-max-bs-decode 8 --batch-size 1 4 --input-len 512 --output-len 16 \
    --result-filename "$OUT/one_batch.jsonl" &
  part trace 200 bash bench/h200/trace.sh &
  wait
) &
# as many servers at once as 32 cores start in time: one set of features; SGLang picks ports itself from 22000 on
(
  sleep 100
  part parallel 230 env -u CUDA_VISIBLE_DEVICES $AB --port 8000 --boot 180 dp2 dcp2 tp2 one
  at parallel
  grep -v '^{' "$OUT/parallel.log"
) &
# one set a run: features-a to -e and compile on one GPU, features-f on both
(
  sleep 200
  part features 300 env -u CUDA_VISIBLE_DEVICES $AB --port 2000 --boot 240 ${FEATURES:-features-c}
  at features
  grep -v '^{' "$OUT/features.log"
) &
(
  sleep 300
  part sanitize 200 python3 -m bench.sanitize --jobs 20 --limit 90 --deadline 190 --json "$OUT/sanitize.json"
  at sanitize
) &
while [ $(($(date +%s) - T0)) -lt ${LIMIT:-510} ] && [ "$(jobs -r | wc -l)" -gt 1 ]; do sleep 2; done
at end
tail -n 5 /tmp/load.log /tmp/load/*.out | cut -c1-200
cp -r /tmp/load "$OUT/load_so_far" 2> /dev/null
pack
