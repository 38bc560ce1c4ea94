#!/bin/sh
# timeline.sh PROGRAM [OPTION...]: two or three steady steps of a chapter on virtual GPUs, with the
# network, batch, GPUs and hardware that show the chapter's point: as text, and as the picture
# VIRTUAL_GPU_SVG where that is given. Options, HARDWARE and VIRTUAL_GPU_STEPS override.
program=$1
case $program in */*) ;; *) program=./$program ;; esac
[ -x "$program" ] ||
  { echo "timeline.sh: \"$program\": no such program; make builds them" >&2; exit 2; }
shift
# Eight equal layers on hardware where only products take time: a stage's boxes have one length.
equal="--hidden 64,64,64,64,64,64,64 --classes 64 --batch 64"
hardware=h100 steps=2:3
case ${program##*/} in
  01_*) options="--hidden 1024,1024 --batch 256" ;;
  02_*) options="--gpus 4 --hidden 1024,1024 --batch 256" ;;
  03_*) options="--gpus 4 --mode async --slow-worker 2 --hidden 512,512 --steps 34" steps=14:25 ;;
  04_*) options="--gpus 4 $equal" hardware=ideal,link_bandwidth=40e9 ;;
  05_*) options="--gpus 4 --hidden 1024,1024,1024 --batch 512" hardware=v100 steps=3:4 ;;
  06_*) options="--gpus 4 $equal --microbatches 8" hardware=ideal ;;
  07_*) options="--gpus 8 --pp 2 --tp 2 --hidden 1024,1024,1024 --batch 512"
        hardware=v100 steps=3:4 ;;
  08_*) options="--gpus 4 --pp 2 --accumulate 2 --hidden 1024,1024,1024 --batch 512"
        hardware=v100 steps=3:4 ;;
  *) options= ;;
esac
# Many micro-batches: one step, so that every box has room for its number.
case $* in *--microbatches[\ =][2-9][0-9]*) steps=${steps%:*} ;; esac
# Steps are steady after the first two. Chapter 03's messages say who goes on, so they must arrive.
case ${program##*/} in 03_*) ;; *) options="--steps 5 $options" VIRTUAL_GPU_SKIP_MATH=1 ;; esac
export VIRTUAL_GPU_SKIP_MATH VIRTUAL_GPU="${VIRTUAL_GPU:-$hardware}"
export VIRTUAL_GPU_STEPS="${VIRTUAL_GPU_STEPS:-$steps}" VIRTUAL_GPU_TEXT="${VIRTUAL_GPU_TEXT:--}"
exec "$program" $options "$@" --quiet
