#!/usr/bin/env bash
# Two H200s, 590 s: everything whose answer matters and whose time does not. See README.md beside it.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
nvidia-smi --query-gpu=memory.used --format=csv
# ten minutes of load on the second GPU; it outlives this command (results in /tmp/load)
CUDA_VISIBLE_DEVICES=1 setsid bash bench/h200/load.sh 600 /tmp/load > /tmp/load.out 2>&1 &
CUDA_VISIBLE_DEVICES=1 part trace 180 bash bench/h200/trace.sh &
export CUDA_VISIBLE_DEVICES=0
TEST="python3 -m pytest -q --require-gpu -p no:cacheprovider --maxfail=20 --tb=short"
part lm 470 bash bench/h200/lm.sh &
(
  sleep 100
  part faults 300 python3 -m bench.load.faults --json "$OUT/faults.json"
) &
(
  part test_gather_cast_gpu 200 $TEST tests/gpu/test_gather_cast_gpu.py
  part test_cases_gpu 90 $TEST tests/gpu/test_cases_gpu.py -k "draft or replay or graph"
  part kit 130 bash tests/gpu/kit.sh
  part sanitize 210 bash bench/h200/sanitize.sh &
  part test_state_machine_gpu 200 $TEST -s tests/gpu/test_state_machine_gpu.py
  at tests
  wait
) &
(
  sleep 60
  part numerics 300 python3 bench/numerics.py --seeds 2 --json "$OUT/numerics.json"
) &
(
  python3 -m bench.serve.make_nextn /tmp/nextn
  sleep 250
  # both GPUs. SGLang picks ports itself from 22000 on
  unset CUDA_VISIBLE_DEVICES
  part parallel 270 python3 -m bench.serve.spec_ab --tool "$TOOL" --port 18000 --boot 210 dp2 dcp2 tp2 one
  at parallel
) &
while [ $(($(date +%s) - T0)) -lt 545 ] && [ -n "$(jobs -r | grep -v load.sh)" ]; do sleep 2; done
at end
grep -v '^{' "$OUT/parallel.log" | tail -n 24
cp -r /tmp/load /tmp/load.out "$OUT/" 2>/dev/null
pack
