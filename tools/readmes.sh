#!/bin/sh
# Runs every line of every sh block in the READMEs and in docs/: text that is not run drifts.
# A line that fails is shown with what it printed. Leaves "passed failed" in the file $1, and what
# failed in $1.said.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
list=$(mktemp) said=$(mktemp) failures=$(mktemp)
trap 'rm -f "$list" "$said" "$failures"' EXIT
awk '/^```sh$/ { on = 1; next } /^```/ { on = 0 } on && NF { print FILENAME "\t" $0 }' \
  README.md 0*/README.md docs/*.md > "$list"
while IFS="$(printf '\t')" read -r file line; do
  begin=$(date +%s)
  if timeout 120 sh -c "$line" < /dev/null > "$said" 2>&1; then
    passed=$((passed + 1))
    echo "$(($(date +%s) - begin)) s  $file: $line"
  else
    failed=$((failed + 1))
    { echo "FAILED  $file: $line"; tail -5 "$said"; } | tee -a "$failures"
  fi
done < "$list"
if [ -n "$1" ]; then
  echo "$passed $failed" > "$1"
  cp "$failures" "$1.said"
fi
[ "$failed" = 0 ] && [ "$passed" != 0 ]
