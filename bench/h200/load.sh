#!/usr/bin/env bash
# load and faults on one GPU, in the background of other work (about 60 GB of its memory at most):
#   CUDA_VISIBLE_DEVICES=1 setsid bash bench/h200/load.sh 420 /tmp/load > /tmp/load.log 2>&1 < /dev/null &
#   ... later: test -e /tmp/load/DONE && cp -r /tmp/load "$OUT"
# SECONDS of load; everything takes about 330 s more. FAULTS=0 leaves the faults out, FAULTS=only the load.
trap '' HUP
load_s=${1:?usage: load.sh SECONDS [DIRECTORY]}
dir=${2:-${OUT:-/tmp}/load}
mkdir -p "$dir"
rm -f "$dir/DONE"
# env.sh installs the package anew, which would pull it from under servers that run already
case ":$PYTHONPATH:" in
  *"/p/site:"*) ;;
  *) . bench/h200/env.sh ;;
esac
export PYTHONUNBUFFERED=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
faults=${FAULTS:-1}
begin=$(date +%s)
say() { echo "=== $1 at $(($(date +%s) - begin)) s"; }
model=${NEXTN8:-/tmp/nextn8}
pids=()
arms=(auto stock exact)
if [ "$faults" != only ]; then
  if [ ! -e "$model/config.json" ]; then
    timeout 120 python3 -m bench.serve.make_nextn "$model" --layers 8 2>&1 | tail -n 3
    say "checkpoint written"
  fi
  for arm in "${arms[@]}"; do
    timeout -k 20 $((load_s + 900)) python3 -m bench.load.load --arm $arm --seconds "$load_s" \
      --model "$model" --json "$dir/$arm.json" > "$dir/$arm.out" 2>&1 &
    pids+=($!)
  done
  say "three arms started"
  # faults boot servers too: not while the arms boot and ask alone
  for _ in $(seq 130); do
    waiting=0
    for i in 0 1 2; do
      grep -q 'load begins' "$dir/${arms[i]}.out" || { kill -0 "${pids[i]}" 2> /dev/null && waiting=1; }
    done
    [ $waiting = 0 ] && break
    sleep 3
  done
  say "load begins"
fi
if [ "$faults" != 0 ]; then
  timeout -k 20 540 python3 -m bench.load.faults --json "$dir/faults.json" > "$dir/faults.out" 2>&1
  say "faults rc $?"
fi
for pid in "${pids[@]}"; do
  wait "$pid"
  say "an arm ended, rc $?"
done
# what a driver that was killed itself left behind: by the ids that it wrote
for file in "$dir"/*.pid "$dir"/*/*.pid; do
  [ -e "$file" ] && kill -9 -- "-$(cat "$file")" 2> /dev/null
done
[ "$faults" != only ] && python3 -m bench.load.load --judge "$dir" > "$dir/verdict.out" 2>&1
say "verdict rc $?"
[ -e "$dir/load-verdict.json" ] && tail -n 30 "$dir/verdict.out"
[ -e "$dir/faults.out" ] && grep -E "^\[|steps" "$dir/faults.out" | cut -c1-220
date > "$dir/DONE"
