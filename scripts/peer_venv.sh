#!/usr/bin/env bash
# Makes the environment of the speculators 0.9.0 trainer for scripts/peer_speculators.py (1.5 GB, about a
# minute):   bash scripts/peer_venv.sh [FOLDER, default .peer]   then   --peer-python FOLDER/bin/python
# Without --no-deps it would also fetch torchvision, torchaudio and with them a CUDA build of torch; the
# trainer imports none of the three.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-.peer}"
python="${OUTRIDER_PYTHON:-python3}"
install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
install "$(grep '^torch==' constraints.txt)"  # first, so that nothing later pulls in another build
install transformers==5.19.0 datasets==5.1.0 loguru==0.7.3 'numpy>=2,<=2.5.4' 'pydantic>=2' \
  'pydantic-settings>=2' rich safetensors 'tqdm<=4.70.1' 'typer>=0.12' click httpx psutil 'openai>=2' \
  protobuf aiohttp
install --no-deps speculators==0.9.0 hs-connectors==0.9.0
"$folder/bin/python" -c 'import speculators.train.cli, speculators.train.trainer'
echo "ready: --peer-python $folder/bin/python"
