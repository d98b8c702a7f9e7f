#!/usr/bin/env bash
# SGLang's kit on a GPU, from the repository's root: results in $OUT, some 60 s on an H200.
# Four processes, so that a hang or a lost CUDA context ends one of them only; kit.jsonl grows as
# runs end, so that a cut keeps what was done.
set -u
: "${OUT:?names the folder of the results}"
export COLUMNS=200
rm -f "$OUT/kit.jsonl"
risky="layout or frozen or dflash or ngram"
part() { # name, seconds, -k expression
  timeout -s KILL "$2" python3 -m pytest tests/gpu/test_kit_gpu.py -q --require-gpu --tb=short -rf \
    -p no:cacheprovider --timeout=60 --durations=6 -k "$3" > "$OUT/kit_$1.log" 2>&1
  echo "$1: exit $?: $(tail -1 "$OUT/kit_$1.log")"
}
part graphs 120 "not fused and not ($risky) and (graph or replay or draft or verify)" &
part eager 120 "not fused and not ($risky) and not graph and not replay and not draft and not verify" &
part fused 120 "fused and not ($risky)" &
part risky 120 "$risky" &
wait
python3 tests/gpu/kit_table.py "$OUT/kit.jsonl" | tee "$OUT/kit.md"
