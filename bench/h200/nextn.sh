#!/usr/bin/env bash
# One H200 that nobody else uses, 230 s: NextN over 61 layers, stock's draft steps beside ours. See README.md beside it.
pack() { :; } # a script that calls this one packs
[[ ":$PYTHONPATH:" == *":$HOME/p/site:"* ]] || source bench/h200/env.sh
export CUDA_VISIBLE_DEVICES=0 NEXTN=/tmp/nextn61
[ -e $NEXTN/config.json ] || python3 -m bench.serve.make_nextn $NEXTN 2>&1 | tail -n 1
python3 -m bench.serve.spec_ab --tool "$HOME/p/tools/serve_ab.py" --port 4000 --boot 180 --out nextn.json \
  nextn-one nextn-three > "$OUT/nextn.log" 2>&1
echo "nextn rc $?"
grep -v '^{' "$OUT/nextn.log"
pack
