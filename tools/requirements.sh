#!/bin/sh
# requirements.sh BACKEND [-q]: what this machine has for building, and the Debian package that
# brings what it lacks. -q: only what BACKEND cannot do without. Exit status 1 if that is missing.
backend=$1 quiet=$2 missing=0
CXX=${CXX:-g++} NVCC=${NVCC:-nvcc} BLAS_LIBS=${BLAS_LIBS:--lopenblas}

compiles() {  # source, libraries...
  source=$1
  shift
  printf '%s\n' "$source" | $CXX -std=c++20 -x c++ - -x none -o /dev/null "$@" 2>/dev/null
}

# name, backend that needs it, package, command that succeeds where it is there
look() {
  name=$1 needed_by=$2 package=$3
  shift 3
  if "$@" >/dev/null 2>&1; then
    [ -n "$quiet" ] || printf '%-34s found\n' "$name"
  elif [ "$needed_by" = all ] || [ "$needed_by" = "$backend" ]; then
    echo "$name is missing: install $package" >&2
    missing=1
  else
    [ -n "$quiet" ] || printf '%-34s missing: install %s\n' "$name" "$package"
  fi
}

look "C++20 compiler ($CXX)" all "g++ (Debian: apt-get install g++)" compiles 'int main() {}'
[ $missing = 1 ] && exit 1  # without it nothing else can be looked for
look "zlib" all "zlib1g-dev" compiles '#include <zlib.h>
int main() { return zlibVersion() == nullptr; }' -lz
look "CBLAS ($BLAS_LIBS)" virtual "libopenblas-dev, or name another with BLAS_LIBS=" compiles '
#include <cblas.h>
int main() { return cblas_ddot(0, nullptr, 1, nullptr, 1) != 0; }' $BLAS_LIBS
if [ -z "$quiet" ] || [ "$backend" = tests ]; then
  look "Catch2 (tests)" tests "catch2" compiles '#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_version_macros.hpp>
#else
#include <catch2/catch.hpp>
#endif
int main() {}'
fi
if [ -z "$quiet" ]; then
  look "gnuplot (make curves)" none "gnuplot-nox" gnuplot --version
  look "jq (make curves)" none "jq" jq --version
fi
if [ -z "$quiet" ] || [ "$backend" = cuda ]; then
  nccl() { echo '#include <nccl.h>' | $NVCC -E -x cu -; }
  look "CUDA compiler ($NVCC)" cuda "the CUDA toolkit 12 or 13 (nvcc on PATH)" $NVCC --version
  look "NCCL" cuda "libnccl-dev" nccl
  [ -n "$quiet" ] || look "GPU" none "an NVIDIA driver, or use BACKEND=virtual" nvidia-smi -L
fi
exit $missing
