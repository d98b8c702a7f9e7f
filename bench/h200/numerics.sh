#!/usr/bin/env bash
# One H200, about 120 s: the errors of docs/numerics.md, and the model of a serving engine. See README.md.
source bench/h200/env.sh
python3 -m sglang_fp8mla.machine
part numerics 150 python3 bench/numerics.py --seeds 2 --json "$OUT/numerics.json"
at numerics
grep failed "$OUT/numerics.log" | cut -c1-200
TEST="python3 -m pytest -q -s --require-gpu -p no:cacheprovider --maxfail=4 --tb=short"
part test_state_machine_gpu 300 $TEST tests/gpu/test_state_machine_gpu.py
at state_machine
grep ' page ' "$OUT/test_state_machine_gpu.log"
pack
