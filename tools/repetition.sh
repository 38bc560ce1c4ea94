#!/bin/sh
# How much of the chapters is repeated: of each chapter its lines of code, those that count, what
# `make diff-NN` removes and adds (code alone), and of all the part that is distinct. What counts is
# a line with at least 20 characters of code: shorter ones (braces, `return result;`) repeat in any
# program. Fails if less than half is distinct.
cd "$(dirname "$0")/.." || exit 1
code() { sed 's://.*$::; s/^[ \t]*//; s/[ \t]*$//' "$@" | grep -v '^#' | grep .; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '%-20s %6s %8s %8s %6s\n' "lines of code" all counted removed added
for chapter in "$@"; do
  code "$chapter"/main.cu "$chapter"/*.cuh "$chapter"/*.h 2> /dev/null > "$work/code"
  grep -E '.{20}' "$work/code" >> "$work/all"
  base=$(sed -n '1s/.*Base: *\([0-9a-z_]*\).*/\1/p' "$chapter/train.cuh")
  removed=- added=-
  if [ -f "$base/train.cuh" ]; then
    code "$base/train.cuh" > "$work/old"
    code "$chapter/train.cuh" > "$work/new"
    removed=$(diff "$work/old" "$work/new" | grep -c '^<')
    added=$(diff "$work/old" "$work/new" | grep -c '^>')
  fi
  printf '%-20s %6d %8d %8s %6s\n' "$chapter" "$(wc -l < "$work/code")" \
    "$(grep -cE '.{20}' "$work/code")" "$removed" "$added"
done
sort "$work/all" | uniq -c | awk '{ all += $1; distinct++ } END {
  printf "%d of the %d that count are distinct: %.0f %%\n", distinct, all, 100 * distinct / all
  exit 2 * distinct < all }'
