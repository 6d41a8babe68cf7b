#!/usr/bin/env bash
# Wheels of a folder into a folder for PYTHONPATH, for a GPU machine that reaches no package index. Parts of a wheel that was
# too large to carry whole (NAME.whl.aa, NAME.whl.ab, ...) are joined first.
#
#     source scripts/gpu_setup.sh WHEELS TARGET
set -e
wheels=$1 target=$2
for first in "$wheels"/*.whl.aa; do
  [ -e "$first" ] && cat "${first%.aa}".a? > "${first%.aa}" && rm "${first%.aa}".a?
done
python3 -m pip install -q --no-index --no-deps --no-compile --target "$target" "$wheels"/*.whl
export PYTHONPATH="$target:$PWD"
set +e
