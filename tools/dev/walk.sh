#!/usr/bin/env bash
# ./dev walk: the README's "Use", by its text alone, as somebody goes through it who has a plain DDP script: the commands of
# its first block make the wheel and an environment, those of its third one start the script, here with two ranks on this
# machine. The script is the example without the line that makes it Paceline's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/dev/common.sh

# block N: the lines of the N-th fenced block below "## Use", without their comments.
block() {
  awk -v n="$1" '/^## Use/ {use = 1} use && /^```/ {++fences; next} use && fences == 2 * n - 1' README.md | sed 's/ *#.*//'
}

walk="$PWD/build/walk"
rm -rf "$walk"; mkdir -p "$walk"
say "the README's commands: an environment with the wheel"
while read -r line; do
  line="${line//\~\/train/$walk/train}"
  printf '  %s\n' "$line"
  bash -ec "$line" </dev/null >"$walk/log" 2>&1 || { tail -20 "$walk/log"; die "the README's command failed: $line"; }
done < <(block 1)
"$walk/train/bin/pip" install -q scikit-learn  # the data of this script

grep -v 'import paceline' examples/pytorch_native_ddp_demo.py >"$walk/plain.py"
sed '0,/^import torch$/s//import paceline.torch\nimport torch/' "$walk/plain.py" >"$walk/train.py"
[ "$(diff "$walk/plain.py" "$walk/train.py" | grep -c '^[<>]')" = 1 ] || die "the script got more than one line"

# run_line COMMAND SCRIPT: one of the README's lines with two ranks here. Leaves its output in $walk/log.
run_line() {
  local line="$1"
  line="${line//--nnodes=4 --nproc_per_node=1 …/…}"
  line="${line//…/--standalone --nproc_per_node=2}"
  line="${line//train.py/$2}"
  start "$line" && return
  # torch's own Gloo may abort when its process ends (docs/troubleshooting.md): once more, where nothing of ours ran.
  if [[ $2 = plain.py || $1 = PACELINE_DISABLE=1* ]] && grep -q "terminate called without an active exception" "$walk/log"; then
    say "torch's Gloo aborted at the end of a process; once more"
    start "$line" && return
  fi
  grep -v "^$" "$walk/log" | head -60
  die "it failed: $1"
}
start() { (cd "$walk" && PATH="$walk/train/bin:$PATH" OMP_NUM_THREADS=1 timeout 300 bash -ec "$1" </dev/null >log 2>&1); }
last_figures() { grep -o 'test accuracy [0-9.]*%' "$walk/log" | tail -1; }

say "the script as it was"
run_line "torchrun … train.py" plain.py
printf '  %-70s %s\n' "plain" "$(last_figures)"
say "with the one line"
while read -r line; do
  run_line "$line" train.py
  said=$(grep -oE 'paceline: 2 ranks.*' "$walk/log" || true)
  case "$line" in
    *PACELINE_DISABLE=1*) [ -z "$said" ] || die "switched off, it said: $said" ;;
    *) [ -n "$said" ] || { tail -20 "$walk/log"; die "no line at the start: $line"; } ;;
  esac
  printf '  %-70s %s\n    %s\n' "$line" "$(last_figures)" "$said"
done < <(block 3)

say "as a process group, without an import"
cat >"$walk/group.py" <<'PY'
import torch
torch.distributed.init_process_group("paceline")
rank = torch.distributed.get_rank()
sums = torch.arange(8.0) * (rank + 1)
torch.distributed.all_reduce(sums)
assert sums.tolist() == [3.0 * i for i in range(8)], sums
torch.distributed.destroy_process_group()
PY
run_line "torchrun … train.py" group.py
"$walk/train/bin/paceline" doctor >"$walk/log" 2>&1 || { tail -20 "$walk/log"; die "paceline doctor finds something wrong here"; }
say "walked through"
