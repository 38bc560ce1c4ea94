#!/bin/sh
# Sums up the folder $1, where each test left a file "passed failed" and, beside it in NAME.said, what
# it printed: the failed ones are shown again, so that the end of a long log says which they were.
# The last line is "N passed, N failed"; without one passed test, that too is a failure.
cd "$1" || exit 1
for test in *; do
  case $test in *.said) continue ;; esac
  [ ! -e "$test" ] || awk '{ failed += $2 } END { exit failed > 0 }' "$test" || {
    echo "FAILED: $test"
    [ ! -e "$test.said" ] || tail -n 40 "$test.said"
  }
done
find . -type f ! -name '*.said' -exec cat {} + | awk '{ passed += $1; failed += $2 }
  END { print passed + 0 " passed, " failed + 0 " failed"; exit failed > 0 || passed == 0 }'
