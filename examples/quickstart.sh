#!/usr/bin/env bash
# From nothing to a perplexity table: installs everplex, fetches a real model and real text, evaluates, prints.
# Needs Python 3.11 or newer with pip. Run it again to see it reuse what is there.
# Usage: bash examples/quickstart.sh [OUT]
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/environment.sh

make_environment "gguf"
CACHE="${EVERPLEX_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/everplex}/quickstart"
OUT="${1:-runs/quickstart}"

echo "== fetching SmolLM2-135M and the introductions of Wikipedia articles into $CACHE"
"$VENV/bin/python" examples/fetch_parts.py "$CACHE"

echo "== evaluating; interrupt it and run it again: it continues"
exec "$VENV/bin/everplex" run "$CACHE/wikipedia.jsonl" \
    --model "$CACHE/smollm2-135m" --out "$OUT" \
    --id-field id --group-by topic --groups "$(cat "$CACHE/topics.txt")" --sample-documents 190 \
    --context 1024 --chunk-tokens 2048
