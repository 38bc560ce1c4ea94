#!/bin/sh
# curves.sh PROGRAMS OUT: loss and test accuracy by step and by the GPU's clock, as six pictures in
# OUT, from reports of the programs in PROGRAMS. A report has the loss of every update, but one
# accuracy; so a run is done again with fewer --steps. At a constant rate and on the virtual clock
# the shorter run is the beginning of the longer one, and that is checked.
programs=$1 out=$2
for needed in jq:jq gnuplot:gnuplot-nox; do
  command -v ${needed%:*} > /dev/null && continue
  echo "curves.sh: ${needed%:*} is missing: install ${needed#*:}" >&2
  exit 2
done
[ -d "$programs" ] ||
  { echo "curves.sh: \"$programs\": no such folder; make builds it" >&2; exit 2; }
mkdir -p "$out" || exit 1
window=12  # a point of the loss is the mean of so many updates

# curve NAME TITLE LAST "STEPS ..." PROGRAM OPTION...: runs to each number of STEPS. The LAST
# updates of a run need not be the longer one's: in ssp and async the slow worker's batch comes late in
# both, but in the shorter run nothing is left that others could be ahead with.
curve() {
  name=$1 title=$2 last=$3 steps=$4 program=$5
  shift 5
  reports=
  for n in $steps; do
    report=$out/$name-$n.json reports="$reports $out/$name-$n.json"
    "$programs/$program" "$@" --steps $n --quiet --report "$report" || exit 1
  done
  jq -es --argjson last $last 'map(.losses) | .[-1] as $all | all(.[]; .[:length - $last] as $own |
      $own == $all[:$own | length])' $reports > "$out/same" ||
    { echo "curves.sh: $title: a shorter run is not the beginning of a longer one" >&2; exit 1; }
  jq -r '[(.losses | length), (.losses | length) * .step_seconds * 1000, .test_accuracy * 100] |
      @tsv' $reports > "$out/$name.accuracy"
  jq -r '.step_seconds as $s | .losses | to_entries[] | [.key + 1, (.key + 1) * $s * 1000, .value] |
      @tsv' "$report" | awk -v n=$window -v skip=$((${steps##* } / 400 + 1)) '
      { sum += $3 - loss[NR % n]; loss[NR % n] = $3 }
      NR % skip == 0 { print $1, $2, sum / (NR < n ? NR : n) }' > "$out/$name.loss"
  curves="$curves $name" titles="$titles '$title'"
}

# picture NAME TITLE STEPS MILLISECONDS: the curves since the last one, by either.
picture() {
  for by in step clock; do
    [ $by = step ] && column=1 axis=updates range=$3 || {
      column=2 axis="milliseconds by the GPU's clock" range=$4; }
    gnuplot <<END || exit 1
set terminal svg size 640,640 font "sans-serif,17" background "white"
set output "$out/curves-$1-$by.svg"
names = "$curves"
titles = "$titles"
array colour[5] = [0x000000, 0xd55e00, 0x0072b2, 0x009e73, 0xaa4499]
array mark[5] = [4, 7, 8, 2, 12]
file(i, kind) = sprintf("$out/%s.%s", word(names, i), kind)
set multiplot title "$2"
set xrange [0:$range]
set lmargin 10
set rmargin 2
set grid ytics lc rgb "#dddddd"
set border 3
set tics nomirror
set size 1,0.46
set origin 0,0.47
set key off
set logscale y
set yrange [0.01:4]
set ylabel "loss, mean of $window"
plot for [i=1:words(names)] file(i, "loss") using $column:3 with lines lw 2 dt i \\
  lc rgb colour[i]
unset logscale
set size 1,0.48
set origin 0,0
set yrange [0:100]
set ylabel "test accuracy, %"
set xlabel "$axis"
set key at graph 0.99,0.79 samplen 3 spacing 0.9
plot for [i=1:words(names)] file(i, "accuracy") using $column:3 with linespoints lw 2 dt i \\
  pt mark[i] ps 0.8 lc rgb colour[i] title word(titles, i)
END
  done
  curves= titles=
}

few="10 20 40 60 80 100 140 180 240 300"
curve one "one GPU" 0 "$few 400 640" 01_single_gpu || exit 1
for run in "sync:--mode sync" "SSP, S = 1:--mode ssp --staleness 1" "async:--mode async" \
           "async, momentum 0.5:--mode async --momentum 0.5"; do
  case $run in sync*) late=0 all=$few ;; SSP*) late=16 all="$few 400 640" ;;
    *) late=16 all="$few 400 640 1000 1400 1800" ;; esac
  name=$(echo "${run%%:*}" | tr -cd 'a-z0-9')
  curve $name "${run%%:*}" $late "$all" 03_async_ps --gpus 5 --slow-worker 2 ${run#*:} || exit 1
done
picture async "Four workers, one of them 4 times slower" 300 40

few="5 10 20 30 45 60 80 100 120 144"
curve base "1 GPU, batch 32" 0 "$few" 02_data_parallel --gpus 1 --batch 32 --lr 0.01 || exit 1
for rule in none sqrt linear; do
  curve $rule "8 GPUs, batch 256, $rule" 0 "$few" 02_data_parallel --gpus 8 --batch 256 \
    --base-batch 32 --lr 0.01 --lr-scale $rule || exit 1
done
picture rules "The rate of a larger batch" 144 10

few="4 8 12 18 24 36 48 72 96"
export VIRTUAL_GPU=t4
for format in fp32 fp16 bf16; do
  curve $format $format 0 "$few" 08_accum_amp --gpus 1 --pp 1 --microbatches 1 --hidden 512,512 \
    --batch 256 --lr 0.02 --precision $format || exit 1
done
picture precision "Formats on a T4, two layers of 512" 96 12
echo "$out/curves-*.svg"
