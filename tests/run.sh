#!/usr/bin/env bash
# Makes or reuses the environment, then lint, types and tests, all against the installed package.
# Usage: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/environment.sh

make_environment "test"
export TOKENIZERS_PARALLELISM=true HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1

echo "== lint" && "$VENV/bin/ruff" check . && "$VENV/bin/ruff" format --check .
echo "== types" && "$VENV/bin/mypy" -p everplex && "$VENV/bin/mypy" tests examples
echo "== tests" && "$VENV/bin/pytest" "$@"
