#!/usr/bin/env bash
# load and faults on one GPU, in the background of other work (about 60 GB of its memory at most):
#   CUDA_VISIBLE_DEVICES=1 setsid bash bench/h200/load.sh 420 /tmp/load > /tmp/load.log 2>&1 < /dev/null &
#   ... later: test -e /tmp/load/DONE && cp -r /tmp/load "$OUT"
# SECONDS of load; everything takes about 330 s more.
trap '' HUP
load_s=${1:?usage: load.sh SECONDS [DIRECTORY]}
dir=${2:-${OUT:-/tmp}/load}
mkdir -p "$dir"
rm -f "$dir"/{DONE,*.json,*.out}
# env.sh installs the package anew, which would pull it from under servers that run already
[[ :$PYTHONPATH: == *"/p/site:"* ]] || . bench/h200/env.sh
begin=$(date +%s)
say() { echo "=== $1 at $(($(date +%s) - begin)) s"; }
model=/tmp/nextn8
[ -e $model/config.json ] || timeout 120 python3 -m bench.serve.make_nextn $model --layers 8 2>&1 | tail -n 3
for arm in auto stock exact; do
  timeout -k 60 $((load_s + 900)) python3 -m bench.load.load --arm $arm --seconds "$load_s" \
    --model $model --json "$dir/$arm.json" > "$dir/$arm.out" 2>&1 &
done
say "three arms started"
# faults boot servers too: not while the arms boot and ask alone
for _ in $(seq 130); do
  [ "$(grep -l 'load begins' "$dir"/*.out | wc -l)" -ge "$(jobs -r | wc -l)" ] && break
  sleep 3
done
say "load begins"
timeout -k 60 540 python3 -m bench.load.faults --json "$dir/faults.json" > "$dir/faults.out" 2>&1
say "faults rc $?"
wait
say "arms ended"
python3 -m bench.load.load --judge "$dir" > "$dir/verdict.out" 2>&1
say "verdict rc $?"
tail -n 30 "$dir/verdict.out"
grep -E "^\[|steps" "$dir/faults.out" | cut -c1-220
date > "$dir/DONE"
