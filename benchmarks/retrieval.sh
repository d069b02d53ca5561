#!/bin/sh
# The table of the gradient cache's paper, and its figure 1, on the docstrings of the Python that runs this: one GPU.
#
#     benchmarks/retrieval.sh [FOLDER] [key=value ...]
#
# FOLDER gets compare.md, compare.csv, updates.csv, updates.svg and every trial's curve. Of the environment: PYTHON,
# BATCHES, UPDATES, MEMORY, SEEDS, JOBS. First the updates are timed, one by one; then the trials run, JOBS at a time.
set -eu

folder=${1:-runs}
[ $# -eq 0 ] || shift

exec "${PYTHON:-python}" -m contrastile compare "$(dirname "$0")/../recipes/docstrings-bert.toml" "$@" \
    --memory "${MEMORY:-1GiB}" --batches ${BATCHES:-128 512 4096 16384} \
    --updates ${UPDATES:-64 128 256 512 1024 2048 4096} \
    --seeds "${SEEDS:-3}" --jobs "${JOBS:-8}" --runs "$folder"
