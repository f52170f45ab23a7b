#!/usr/bin/env bash
# Trains a real EAGLE-3 head on a real 135M model, measures it exactly, and writes a report.
#   bash scripts/demo.sh            about 12 minutes on 2 idle CPU cores
#   bash scripts/demo.sh --quick    the same code on less data, about a minute
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
outrider_setup
exec outrider demo "$@"
