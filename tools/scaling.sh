#!/bin/sh
# scaling.sh PROGRAM GPUS [OPTION...]: how a chapter's step time changes from 1 to GPUS GPUs, by the
# GPU's clock. Strong scaling keeps the batch, weak scaling keeps the samples of a GPU. A chapter
# that has --bucket-bytes runs twice: all at the end (--bucket-bytes 0), and as it does by default
# or by the options given. No batch is short, and no progress line drains the streams.
program=$1 most=$2
case $program in */*) ;; *) program=./$program ;; esac
[ -x "$program" ] || { echo "scaling.sh: \"$program\": no such program; make builds them" >&2; exit 2; }
case $most in ''|*[!0-9]*|0*|?????*)
  echo "scaling.sh: \"$most\" GPUS, a whole number from 1 to 9999 would be right" >&2; exit 2 ;; esac
shift 2
folder=$(mktemp -d) && trap 'rm -r "$folder"' EXIT
report=$folder/report.json
# On the virtual GPU the time does not depend on the numbers, so it may leave out computing them.
export VIRTUAL_GPU_SKIP_MATH=1 VIRTUAL_GPU_COUNT="${VIRTUAL_GPU_COUNT:-$((most > 8 ? most : 8))}"
overlaps=-
"$program" --help | grep -q -e --bucket-bytes && overlaps="no yes"
status=1

# The counts double up to 16; then they quadruple, and the last is what was asked for.
counts= gpus=1
while [ $gpus -lt $most ]; do
  counts="$counts $gpus"
  gpus=$((gpus * (gpus < 16 ? 2 : 4)))
done
counts="$counts $most"

# Many GPUs want more samples than the digits are: as many blank ones of their size. And each rank
# has its parameters on this host too, so there the network is smaller.
hidden=1024,1024,1024
blank() {  # COUNT PART: COUNT images of 8 x 8 pixels, and their labels
  n=$(printf '\\%03o' $(($1 >> 24)) $(($1 >> 16 & 255)) $(($1 >> 8 & 255)) $(($1 & 255)))
  { printf "\\0\\0\\010\\003$n\\0\\0\\0\\010\\0\\0\\0\\010"
    head -c $(($1 * 64)) /dev/zero; } > "$folder/$2-images-idx3-ubyte"
  { printf "\\0\\0\\010\\001$n"; head -c $1 /dev/zero; } > "$folder/$2-labels-idx1-ubyte"
}
if [ $most -gt 8 ]; then
  blank $((32 * most > 256 ? 32 * most : 256)) train
  blank 1 t10k
  set -- --data "$folder" "$@"
  hidden=256,256,256
fi

# row KIND GPUS BATCH OVERLAP OPTION...: one run, one line
row() {
  kind=$1 gpus=$2 batch=$3 overlap=$4
  shift 4
  set -- --hidden $hidden --steps 5 --no-shuffle "$@"
  [ "$overlap" = no ] && set -- "$@" --bucket-bytes 0
  if ! "$program" "$@" --gpus "$gpus" --batch "$batch" --quiet --report "$report" 2> "$folder/err"
  then
    printf '%4d %6d %8s  %s\n' "$gpus" "$batch" "$overlap" "$(head -1 "$folder/err")"
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
    for gpus in $counts; do
      [ $kind = strong ] && batch=256 || batch=$((32 * gpus))
      row $kind $gpus $batch "$overlap" "$@"
    done
  done
done
exit $status
