#!/usr/bin/env bash
# Trains a real EAGLE-3 head on a real 135M model, measures it exactly, and writes a report.
#   bash scripts/demo.sh            about 15 minutes on 2 CPU cores after the downloads
#   bash scripts/demo.sh --quick    the same code on less data, about 3 minutes
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
outrider_setup
exec outrider demo "$@"
