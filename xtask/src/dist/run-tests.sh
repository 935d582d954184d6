#!/bin/sh
# Runs all tests of this folder. Arguments go to every test program: `./run-tests.sh mxfp4` runs the
# tests whose names contain mxfp4. Without a GPU, tests that need one are skipped, or fail with
# MICROSCALE_REQUIRE_GPU=1.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
export MICROSCALE_TEST_DATA="$here"
export MICROSCALE_BIN="$here/microscale"
cd "$here" || exit 1

count=0
failed=
for program in "$here"/test-programs/*; do
    name=$(basename "$program")
    echo "== $name"
    count=$((count + 1))
    "$program" "$@" || failed="$failed $name"
done

echo
if [ -n "$failed" ]; then
    echo "FAILED:$failed"
    exit 1
fi
echo "all $count test programs passed"
