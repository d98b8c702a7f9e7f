#!/usr/bin/env bash
# Two H200s, 300 s: a feature of SGLang each, stock beside ours, on eight layers of bench.serve.make_nextn.
source bench/h200/env.sh
export NEXTN=/tmp/nextn8
python3 -m sglang_fp8mla.machine
python3 -m bench.serve.make_nextn $NEXTN --layers 8
AB="python3 -m bench.serve.spec_ab --tool $TOOL --boot 240"
CUDA_VISIBLE_DEVICES=0 part features_a 310 $AB --port 17000 features-a &
CUDA_VISIBLE_DEVICES=1 part features_b 310 $AB --port 12000 features-b &
# a door that parses its arguments before plugins load
CUDA_VISIBLE_DEVICES=1 part one_batch 200 python3 -m sglang_fp8mla.run sglang.benchmark.one_batch \
  --model-path $NEXTN --skip-tokenizer-init --attention-backend flashinfer_mla_fp8 --kv-cache-dtype fp8_e4m3 \
  --max-total-tokens 65536 --flashinfer-mla-disable-ragged --disable-prefill-cuda-graph --sampling-backend pytorch \
  --cuda-graph-max-bs-decode 8 --batch-size 1 4 --input-len 512 --output-len 16 &
CUDA_VISIBLE_DEVICES=1 part engine 200 python3 bench/serve/engine.py $NEXTN &
wait
at features
grep -hv '^{' "$OUT"/features_?.log
tail -n 4 "$OUT/one_batch.log" "$OUT/engine.log" | cut -c1-200
pack
