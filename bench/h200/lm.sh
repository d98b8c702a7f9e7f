#!/usr/bin/env bash
# One H200, about 300 s, about 50 GB of it: three language models, and what each pool costs them. See README.md.
[[ ":$PYTHONPATH:" == *":$HOME/p/site:"* ]] || source bench/h200/env.sh
TRAIN=${LM_TRAIN:-165} LIMIT=${LM_LIMIT:-320} PORT=${LM_PORT:-14000}
MODELS=/tmp/lm SECONDS=0
trap 'kill $(jobs -p) 2>/dev/null' EXIT
trap 'exit 143' TERM INT
rm -rf $MODELS
CUDA_VISIBLE_DEVICES= timeout 60 python3 -m bench.lm.train $MODELS/boot --untrained
for seed in 0 1 2; do
  mkdir -p $MODELS/$seed
  (
    trap 'kill $!' TERM
    timeout -k 5 $((TRAIN + 60)) python3 -m bench.lm.train $MODELS/$seed --seed $seed --seconds $TRAIN \
      > "$OUT/train$seed.log" 2>&1 &
    wait $! || touch $MODELS/$seed/failed
  ) &
done
# servers boot while the models train
timeout -k 10 $((LIMIT - SECONDS)) python3 -m bench.lm.loss --tool "$HOME/p/tools/serve_ab.py" --port $PORT \
  --boot-model $MODELS/boot --models $MODELS/0,$MODELS/1,$MODELS/2 --limit $((LIMIT - SECONDS - 15)) \
  --json "$OUT/lm.json" > "$OUT/lm.log" 2>&1 &
LOSS=$!
wait $LOSS
RC=$?
for seed in 0 1 2; do
  [ -f $MODELS/$seed/meta.json ] && cp $MODELS/$seed/meta.json "$OUT/meta$seed.json"
  tail -n 1 "$OUT/train$seed.log"
done
cut -c1-200 "$OUT/lm.log" | tail -n 60
echo "lm: rc $RC after $SECONDS s"
exit $RC
