#!/bin/sh
# mesh.sh PROGRAM GPUS [OPTION...]: every mesh of GPUS ranks, data x pipeline x tensor: the step's
# time by the GPU's clock, how much of it is there only because messages take time (found by running
# again with links that take none), the largest bytes of any GPU by what they are for, the memory
# of a GPU, and which mesh is best and why each other one is not. Chapter 07's question, answered
# by trying. Meshes that the network does not allow, or that a GPU's memory does not hold, say so.
program=$1 gpus=$2
case $program in */*) ;; *) program=./$program ;; esac
[ -x "$program" ] || { echo "mesh.sh: \"$program\": no such program; make builds them" >&2; exit 2; }
case $gpus in ''|*[!0-9]*|0*) echo "mesh.sh: \"$gpus\" GPUs, a whole number from 1 would be right" >&2; exit 2 ;; esac
shift 2
report=$(mktemp) && rows=$(mktemp) && trap 'rm -f "$report" "$report.err" "$rows"' EXIT
# On the virtual GPU the time does not depend on the numbers, so it may leave out computing them.
export VIRTUAL_GPU_SKIP_MATH=1
case $program in *virtual-*) virtual=yes hardware=${VIRTUAL_GPU:-h100} ;; *) virtual= hardware= ;; esac
free_links=link_bandwidth=0,link_latency=0,net_bandwidth=0,net_latency=0

# run HARDWARE MEMORY OPTION...: the mesh $d x $p x $t; one stage needs no micro-batches.
run() {
  on=$1 limit=$2 parts=8
  shift 2
  [ $p = 1 ] && parts=1
  set -- --hidden 512,512,512,512,512,512,512 --batch 1024 --microbatches $parts --steps 1 "$@"
  env VIRTUAL_GPU="$on" VIRTUAL_GPU_MEMORY="$limit" "$program" "$@" --gpus $gpus --dp $d --pp $p \
    --tp $t --quiet --report "$report" 2> "$report.err"
}
value() { sed -n "s/^\"$1\": \(.*\),\$/\1/p" "$report"; }

d=$gpus
while [ $d -ge 1 ]; do
  p=1
  while [ $((d * p)) -le $gpus ]; do
    t=$((gpus / (d * p)))
    if [ $((d * p * t)) = $gpus ]; then
      fits=yes
      run "$hardware" "$VIRTUAL_GPU_MEMORY" "$@"
      ran=$?
      if [ $ran != 0 ] && [ $virtual ] && grep -q "out of memory" "$report.err"; then
        fits=no  # how much it would take, on a GPU that has it
        run "$hardware,memory=1000G" "" "$@"
        ran=$?
      fi
      if [ $ran = 0 ]; then
        step=$(value step_seconds) free=$(value step_seconds)
        sent="$(value bytes_sent_for_data) $(value bytes_sent_for_pipeline) $(value bytes_sent_for_tensor)"
        memory=$(value peak_memory)
        [ $virtual ] && run "$hardware,memory=1000G,$free_links" "" "$@" && free=$(value step_seconds)
        echo "$d $p $t $step $free $sent $memory $fits"
      else
        echo "$d $p $t - $(sed -n '1s/^[^:]*: //p' "$report.err")"
      fi >> "$rows"
    fi
    p=$((p + 1))
  done
  d=$((d - 1))
done

awk -v gpus="$gpus" -v hardware="$hardware" '
  $4 == "-" { line[NR] = $0; sub(/^[^-]*- /, "", line[NR]) }
  { d[NR] = $1; p[NR] = $2; t[NR] = $3; step[NR] = $4; free[NR] = $5
    data[NR] = $6; pipe[NR] = $7; tensor[NR] = $8; memory[NR] = $9; fits[NR] = $10 }
  $4 != "-" && $10 == "yes" && (!best || $4 < step[best]) { best = NR }
  $4 != "-" && (!quick || $5 < free[quick]) { quick = NR }
  function why(i) {
    if (i == best) return "the best"
    if (fits[i] != "yes") return "does not fit"
    if (step[i] - free[i] > free[i] - free[quick]) {
      kind = data[i] > tensor[i] ? "data" : "tensor"
      most = data[i] > tensor[i] ? data[i] : tensor[i]
      return pipe[i] > most ? "waits for pipeline messages" : "waits for " kind " sums"
    }
    return p[i] > 1 && p[i] >= t[i] ? "stages idle, small pieces" : "small pieces"
  }
  END {
    printf "%d GPUs%s\n", gpus, hardware ? " (" hardware ")" : ""
    printf "%3s %3s %3s %11s %11s %11s %11s %11s %11s %5s  %s\n", "dp", "pp", "tp", "step us",
           "messages us", "data B", "pipeline B", "tensor B", "memory B", "fits", "why"
    for (i = 1; i <= NR; ++i)
      if (step[i] == "-") printf "%3d %3d %3d  %s\n", d[i], p[i], t[i], line[i]
      else printf "%3d %3d %3d %11.1f %11.1f %11.0f %11.0f %11.0f %11d %5s  %s\n", d[i], p[i], t[i],
                  step[i] * 1e6, (step[i] - free[i]) * 1e6, data[i], pipe[i], tensor[i], memory[i],
                  fits[i], why(i)
    if (!best) { print "no mesh of these GPUs can train this network"; exit 1 }
    printf "best: --dp %d --pp %d --tp %d, %.1f us a step\n", d[best], p[best], t[best],
           step[best] * 1e6
  }' "$rows"
