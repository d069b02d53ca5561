#!/bin/sh
# Every loss of a recipe on the two built-in data sets: three seeds, equal time. About 15 minutes of one CPU core.
#
#     cd /some/folder && CONTRASTILE=/path/to/the/clone sh $CONTRASTILE/benchmarks/losses/run.sh [glyphs|docstrings]
#
# JOBS: trainings at a time. Goes on where it was interrupted. The rows are in runs/glyphs-ways/compare.csv and runs/docstrings-ways/compare.csv.
set -e
here="${CONTRASTILE:?}/benchmarks/losses"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "${1:-glyphs}" = glyphs ]; then
    [ -f runs/glyphs-teacher/run.json ] || contrastile train "$here/glyphs.toml" name=glyphs-teacher \
        model.image.width=24 model.text.width=96 model.features=96 train.examples=80_000 --resume
    contrastile compare "$here/glyphs.toml" --ways "$here/glyphs_ways.toml" --jobs "${JOBS:-1}" --resume
fi
if [ "${1:-docstrings}" = docstrings ]; then
    [ -f runs/docstrings-teacher/run.json ] || contrastile train docstrings name=docstrings-teacher data.mined=3 \
        model.both.width=192 model.tokenizer.size=8_000 model.tokenizer.length=128 model.tokenizer.query_length=32 \
        train.batch=256 train.epochs=3.0 train.minutes=60.0 evaluate.bm25=false evaluate.every=1.0 --resume
    [ -f runs/docstrings-test.jsonl ] || python "$here/scores.py" runs/docstrings-teacher
    contrastile compare "$here/docstrings.toml" --ways "$here/docstrings_ways.toml" --jobs "${JOBS:-1}" --resume
fi
