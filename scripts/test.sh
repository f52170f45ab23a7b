#!/usr/bin/env bash
# Format, lint, types and the quick tests. `--full` adds the slow tests and the whole demo; `--vllm`
# installs vLLM on CPU beside it (.vllm, 3.5 GB) and runs what needs that server, and nothing else.
#   bash scripts/test.sh [--full | --vllm] [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
outrider_setup

if [ "${1:-}" = "--vllm" ]; then
  shift
  [ -n "${OUTRIDER_VLLM_PYTHON:-}" ] || bash scripts/vllm_venv.sh
  export OUTRIDER_VLLM_PYTHON="${OUTRIDER_VLLM_PYTHON:-$PWD/.vllm/bin/python}" HF_HUB_OFFLINE=1
  echo "== tests against vLLM"; pytest -q -s -m vllm tests/vllm "$@"
  exit
fi

full=0
if [ "${1:-}" = "--full" ]; then full=1; shift; fi

# Two processes share the tests, of one thread each (OUTRIDER_TEST_PROCESSES for more).
share=(-n "${OUTRIDER_TEST_PROCESSES:-2}" --dist worksteal)

# Static tools cannot see the editable install's import hook: give them links to follow.
mkdir -p build/types/outrider
for room in heads train data eval scripts; do ln -sfn "$PWD/$room" "build/types/outrider/$room"; done

echo "== format"; ruff format --check .
echo "== lint"; ruff check .
echo "== types"; pyrefly check --summary=none

export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
if [ "$full" = 1 ]; then
  echo "== all tests"; pytest -q "${share[@]}" --durations=15 "$@"
  echo "== the whole demo"; bash scripts/demo.sh
else
  echo "== quick tests"; pytest -q "${share[@]}" -m "not slow" --durations=10 "$@"
fi
