#!/usr/bin/env bash
# One server over a bf16 pool, profiled: the trace in which no cast is to be found. Sourced setup as in env.sh.
PORT=11000
python3 -m sglang.launch_server --model-path ~/p/tools/models/mla-61l --max-total-tokens 131072 \
  --load-format dummy --skip-tokenizer-init --host 127.0.0.1 --port $PORT --sampling-backend pytorch \
  --cuda-graph-max-bs-decode 8 --disable-radix-cache --disable-prefill-cuda-graph \
  --flashinfer-mla-disable-ragged --random-seed 1 --attention-backend flashinfer \
  > "$OUT/server.log" 2>&1 &
SERVER=$!
for _ in $(seq 120); do
  sleep 1
  python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$PORT/health', timeout=5)" 2>/dev/null && break
done
python3 -m sglang_fp8mla.cli profile http://127.0.0.1:$PORT --bs 8 --length 4096 --out "$OUT/traces" --json \
  > "$OUT/profile.json"
echo "profile rc $? (0: no full-pool cast)"
kill $SERVER
