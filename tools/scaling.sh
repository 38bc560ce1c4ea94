#!/bin/sh
# scaling.sh PROGRAM [OPTION...]: how a chapter's step time changes with 1, 2, 4 and 8 GPUs, by the
# GPU's clock. Strong scaling keeps the batch, weak scaling keeps the samples of a GPU. A chapter
# that has --bucket-bytes runs twice: all at the end (--bucket-bytes 0), and as it does by default
# or by the options given. No batch is short, and no progress line drains the streams.
program=$1
shift
case $program in */*) ;; *) program=./$program ;; esac
[ -x "$program" ] || { echo "scaling.sh: \"$program\": no such program; make builds them" >&2; exit 2; }
report=$(mktemp) && trap 'rm -f "$report" "$report.err"' EXIT
# On the virtual GPU the time does not depend on the numbers, so it may leave out computing them.
export VIRTUAL_GPU_SKIP_MATH=1
overlaps=-
"$program" --help | grep -q -e --bucket-bytes && overlaps="no yes"
status=1

# row KIND GPUS BATCH OVERLAP OPTION...: one run, one line
row() {
  kind=$1 gpus=$2 batch=$3 overlap=$4
  shift 4
  set -- --hidden 1024,1024,1024 --steps 5 "$@"
  [ "$overlap" = no ] && set -- "$@" --bucket-bytes 0
  if ! "$program" "$@" --gpus "$gpus" --batch "$batch" --quiet --report "$report" 2> "$report.err"
  then
    printf '%4d %6d %8s  %s\n' "$gpus" "$batch" "$overlap" "$(head -1 "$report.err")"
    return
  fi
  status=0
  step=$(sed -n 's/^"step_seconds": \(.*\),$/\1/p' "$report")
  sent=$(sed -n 's/^"bytes_sent_per_step": \(.*\),$/\1/p' "$report")
  first=${first:-$gpus $step}  # what the rows below are compared with
  echo "$kind $gpus $batch $overlap $step $sent $first" | awk '{
    speedup = $8 / $5 * ($1 == "weak" ? $2 / $7 : 1)
    printf "%4d %6d %8s %11.1f us %8.2f %9.1f %% %13.0f B\n", $2, $3, $4, $5 * 1e6, speedup,
           100 * speedup * $7 / $2, $6
  }'
}

for kind in strong weak; do
  [ $kind = strong ] && echo "strong scaling: a batch of 256, split" || echo "weak scaling: 32 samples a GPU"
  printf '%4s %6s %8s %14s %8s %11s %15s\n' GPUS batch overlap "step time" speedup efficiency "sent a step"
  for overlap in $overlaps; do
    first=
    for gpus in 1 2 4 8; do
      [ $kind = strong ] && batch=256 || batch=$((32 * gpus))
      row $kind $gpus $batch "$overlap" "$@"
    done
  done
done
exit $status
