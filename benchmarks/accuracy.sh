#!/bin/sh
# Accuracy: one loss in five ways on two ranks (CPU), and batch sizes at three sizes of the data (GPU), side by side.
# For a GPU with 16 cores: about six minutes. Further words are overrides for both.
#
#     benchmarks/accuracy.sh FOLDER [key=value ...]
#
# After LIMIT seconds (390) both stop, and what was through by then is in the tables. EXAMPLES (500_000): pairs seen by
# each run of the batch sizes; SEEDS (3): of them.
set -eu
folder=$1
shift
mkdir -p "$folder"
export OMP_NUM_THREADS=1
python=${PYTHON:-python3}
limited="timeout ${LIMIT:-390} $python -m contrastile compare recipes/glyphs.toml"
words="train.precision=float32 train.retain=1 evaluate.every=1.0"

# the pictures are drawn once, before two commands ask for them
$python -c "from contrastile.train.recipe import load_recipe
from contrastile.train.feed import open_materials
open_materials(load_recipe('recipes/glyphs.toml', ['device=cpu']))"

$limited $words device=cpu train.examples=100_000 train.batch=512 train.sub_batch=256 "$@" \
	--losses --ranks 2 --seeds 5 --jobs 3 --runs "$folder" >"$folder/losses.txt" 2>"$folder/losses.log" &
losses=$!
$limited $words train.examples="${EXAMPLES:-500_000}" train.sub_batch=16_384 "$@" \
	--batches 256 512 1024 2048 4096 8192 16384 --data 0.1 0.3 1.0 --rates fixed sqrt --seeds "${SEEDS:-3}" --jobs 10 \
	--runs "$folder" >"$folder/batches.txt" 2>"$folder/batches.log" || echo "batch sizes: exit code $?"
wait $losses || echo "losses: exit code $?"
cat "$folder/losses.txt" "$folder/batches.txt"
