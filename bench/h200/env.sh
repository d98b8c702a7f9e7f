# sourced by the scripts beside it, at the root of the checkout on the device machine
export PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
export HF_HUB_OFFLINE=1 COLUMNS=110 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
if [ ! -d ~/p/site ]; then
  mkdir -p ~/p
  tar -xJf .gpu/payload.tar.xz -C ~/p
  [ -f .gpu/jit.tar.xz ] && tar -xJf .gpu/jit.tar.xz -C ~
  # FlashInfer's sources of MHA decode, for a model without MLA: site/flashinfer/data/csrc
  [ -f .gpu/decode_csrc.tar.xz ] && tar -xJf .gpu/decode_csrc.tar.xz -C ~/p
fi
export PYTHONPATH=$HOME/p/site:$PWD
if [ -z "${KEEP:-}" ]; then # KEEP=1: servers of the last command still run from it
  rm -rf ~/p/site/sglang_fp8mla*
  python3 -m pip install -q --no-deps --no-build-isolation --no-index --target ~/p/site . 2>&1 | grep -v WARNING
fi
TOOL=$HOME/p/tools/serve_ab.py
STOCK=--attention-backend,flashinfer,--kv-cache-dtype,fp8_e4m3
OURS=--attention-backend,flashinfer_mla_fp8,--kv-cache-dtype,fp8_e4m3
T0=$(date +%s)
at() { echo "=== $1 at $(($(date +%s) - T0)) s"; }
# part NAME SECONDS COMMAND...: runs with its own $OUT, keeps the log, prints its end
part() {
  local name=$1 limit=$2
  shift 2
  mkdir -p "$OUT/$name"
  OUT="$OUT/$name" timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
  echo "[$name] rc $? $(tail -n 1 "$OUT/$name.log" | cut -c1-200)"
}
pack() {
  # what still runs may still write: no step depends on the one before
  (cd "$OUT" && tar -czf /tmp/results.tar.gz --exclude='*.safetensors' -- *
    rm -rf -- * && true
    mv /tmp/results.tar.gz .)
  # compilers' caches, which torch.compile makes large, last and within bounds
  timeout 40 tar -cJf /tmp/jit.tar.xz -C ~ $(cd ~ && ls -d .cache/* .triton 2>/dev/null) && mv /tmp/jit.tar.xz "$OUT"
}
