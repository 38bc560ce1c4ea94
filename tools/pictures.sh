#!/bin/sh
# pictures.sh PROGRAMS FOLDER: the READMEs' pictures, from the programs of a virtual build. The
# clock is the same everywhere, so the bytes are too. Each is a timeline of tools/timeline.sh, but
# for strategies.svg: one step of the same network on the same GPUs under five strategies, stacked.
programs=$1 folder=$2
[ $# = 2 ] && mkdir -p "$folder" || { echo "usage: pictures.sh PROGRAMS FOLDER" >&2; exit 2; }
drafts=$(mktemp -d) && trap 'rm -rf "$drafts"' EXIT
unset VIRTUAL_GPU VIRTUAL_GPU_STEPS VIRTUAL_GPU_MEMORY VIRTUAL_GPU_TRACE VIRTUAL_GPU_AXIS \
  VIRTUAL_GPU_COUNT VIRTUAL_GPU_STRICT CUDA_VISIBLE_DEVICES
export VIRTUAL_GPU_TEXT VIRTUAL_GPU_SVG

# draw NAME CHAPTER OPTION...
draw() {
  VIRTUAL_GPU_SVG=$drafts/timeline-$1.svg VIRTUAL_GPU_TEXT=$drafts/text program=$programs/$2
  shift 2
  "$(dirname "$0")/timeline.sh" "$program" "$@" || exit 1
}

draw 01 01_single_gpu
draw 02 02_data_parallel
draw 02-one-bucket 02_data_parallel --bucket-bytes 0
(VIRTUAL_GPU_STEPS=14:17; export VIRTUAL_GPU_STEPS; draw 03-sync 03_async_ps --mode sync) || exit 1
draw 03-async 03_async_ps
draw 04 04_layer_parallel
draw 05 05_tensor_parallel
(
  VIRTUAL_GPU_STEPS=2; export VIRTUAL_GPU_STEPS
  for way in gpipe 1f1b interleaved; do draw 06-$way 06_pipeline --schedule $way; done
) || exit 1
draw 07 07_hybrid
draw 08 08_accum_amp

export VIRTUAL_GPU=v100 VIRTUAL_GPU_STEPS=2
strategies() {
  all=
  while read -r chapter options; do
    name=strategy-${chapter%%_*}
    # Every step has the whole data set, so that all are equal; the longest gives the axis.
    draw $name $chapter --gpus 4 --hidden 512,512,512,512,512,512,512 --batch 1498 --steps 3 \
      $options
    all="$all $drafts/timeline-$name.svg"
  done <<END
02_data_parallel
04_layer_parallel
05_tensor_parallel
06_pipeline --microbatches 8
07_hybrid --dp 2 --pp 2 --tp 1 --microbatches 4
END
}
strategies
export VIRTUAL_GPU_AXIS="$(sed -n 's/.* to \([0-9.e+]*\) us<.*/\1/p' $all | sort -g | tail -1)e-6"
strategies
awk '
  BEGIN {
    split("Data parallel: each GPU has a quarter of the batch|" \
          "Layer parallel: each GPU has a quarter of the layers|" \
          "Tensor parallel: each GPU has a quarter of every layer|" \
          "Pipeline: a quarter of the layers, the batch in 8 parts|" \
          "Hybrid: 2 replicas of a pipeline of 2", title, "|")
    y = 36
  }
  function between(from, to) { sub(from, ""); sub(to, ""); return $0 + 0 }
  FNR == 1 {
    part = "head"; ++file; rows = ""; end = 0; busy = 0; gpus = 0
    match($0, /height=.[0-9]+/); height = substr($0, RSTART + 8, RLENGTH - 8)
  }
  /^<!--/ { part = $2; axis = ""; next }
  /^<svg/ || /^<rect width=.1000/ { next }
  /^<\/svg>/ {
    text = text sprintf("<text x=\"6\" y=\"%d\" font-size=\"16\" font-weight=\"bold\">%s</text>\n" \
      "<text x=\"994\" y=\"%d\" font-size=\"16\" font-weight=\"bold\" text-anchor=\"end\">" \
      "%.0f \302\265s, busy %.0f %%</text>\n<g transform=\"translate(0 %d)\">\n", y + 18,
      title[file], y + 18, end, busy / gpus, y - 24)
    text = text rows (file == 5 ? axis : "") "</g>\n"
    y += height - 50
  }
  part == "head" && file == 1 { head = head $0 "\n" }
  part == "rows" { rows = rows $0 "\n" }
  part == "axis" && !/step |dasharray/ { axis = axis $0 "\n" }
  / us</ { t = $0; sub(/.* to /, "", t); if (t + 0 > end) end = t + 0 }
  / %</ { t = $0; sub(/ %<.*/, "", t); sub(/.*>/, "", t); busy += t; ++gpus }
  END {
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"%d\" viewBox=\"0 0 " \
           "1000 %d\" font-family=\"Helvetica, Arial, sans-serif\">\n<rect width=\"1000\" " \
           "height=\"%d\" fill=\"#fff\"/>\n", y + 30, y + 30, y + 30
    print head text "</svg>"
  }
' $all > "$drafts/strategies.svg"
rm $all "$drafts/text"
for picture in "$drafts"/*.svg; do mv "$picture" "$folder/${picture##*/}" || exit 1; done
