# Sourced by demo.sh and test.sh: one .venv for both, made or refreshed only when its inputs change.
# OUTRIDER_PYTHON names the interpreter to build it with (default python3; 3.11 to 3.13).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

outrider_setup() {
  local python="${OUTRIDER_PYTHON:-python3}" stamp
  stamp="$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16) $("$python" -V) $PWD"
  if [ "$(cat .venv/outrider-stamp 2>/dev/null || true)" != "$stamp" ]; then
    echo "setting up .venv (once; later runs reuse it)"
    "$python" -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else
      f"Outrider needs Python 3.11 to 3.13, this is {sys.version.split()[0]}; set OUTRIDER_PYTHON")'
    rm -f .venv/outrider-stamp
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # torch first and pinned: a later requirement must not pull in another build of it
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      -c constraints.txt -e '.[dev,track,lora]'
    echo "$stamp" > .venv/outrider-stamp
  fi
  export PATH="$PWD/.venv/bin:$PATH"
}
