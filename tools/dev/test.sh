#!/usr/bin/env bash
# ./dev test: set up, build, run every suite; last line 'N passed, N failed'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/dev/common.sh
setup_system
for name in main tf215 tf221; do setup_python $name; done
build_release
exec .venv/bin/python tools/dev/run_suites.py "$@"
