#!/usr/bin/env bash
# Tests and measures tensor parallelism on the GPUs of one host, within about ten minutes:
#     bench/several_gpus.sh NUM_GPUS FOLDER
# writes tests.txt, and a JSON file for each benchmark, to FOLDER. Each command has a limit of its own, and a failed
# command does not stop the others. Shapes that do not fit into the memory of the GPUs are left out.
set -u
cd "$(dirname "$0")/.."
num_gpus=$1
out=$2
python=${PYTHON:-python3}
mkdir -p "$out"
export MASTER_ADDR=127.0.0.1 NCCL_SOCKET_IFNAME=lo

limited() {
    local seconds=$1
    shift
    local begin=$SECONDS
    timeout --kill-after=10 "$seconds" "$@" || echo "exit status $? of: $*"
    echo "($((SECONDS - begin)) s)"
}
engine() {
    local seconds=$1 name=$2
    shift 2
    echo "== engine: $name"
    limited "$seconds" "$python" -m bench.engine --executor ray --num-ranks "$num_gpus" \
        --output "$out/engine_$name.json" "$@"
}

echo "== tests"
limited 200 "$python" -m pytest -m multigpu -q -p no:cacheprovider tests/workers tests/system \
    >"$out/tests.txt" 2>&1
tail -n 3 "$out/tests.txt"
echo "== all-reduce"
limited 60 "$python" -m bench.all_reduce --num-ranks "$num_gpus" --output "$out/all_reduce.json"
engine 130 llama_8b --rounds 2
echo "== prefix"
model=$(mktemp -d)
"$python" -c "from pathlib import Path; from bench.engine.shapes import *; save_model(Path('$model'), LLAMA_8B)"
limited 60 "$python" -m cluster.cli bench throughput "$model" --load-format dummy --workload prefix \
    --max-model-len 8192 --max-num-batched-tokens 8192 --tensor-parallel-size "$num_gpus" --disable-tqdm \
    --output-json "$out/prefix.json"
engine 120 llama_70b --shape llama-70b --workload latency --workload throughput --rounds 1
echo "== rank death"
limited 110 "$python" -m bench.rank_death --num-ranks "$num_gpus" --kills 1 --output "$out/rank_death.json"
engine 90 gpt_oss_120b --shape gpt-oss-120b --workload latency --workload throughput --rounds 1
engine 60 qwen3_30b_experts --shape qwen3-30b-a3b --expert-parallel --workload latency --workload throughput --rounds 1
if [ "$num_gpus" -ge 4 ]; then
    engine 120 qwen3_235b --shape qwen3-235b-a22b --workload latency --workload throughput --rounds 1
fi
