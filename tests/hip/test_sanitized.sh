#!/bin/sh
# The kernels' sources on the CPU under the address and undefined-behaviour sanitizers: every test of the operations once more. TAP, one line for each program.
# BEDSIDE_HIP_TESTS=all: in full length.
set -u
build=${BUILD:-build}
# Neither the programs nor the library in the same build: make asan has everything under sanitizers anyway.
if [ ! -e "$build/hip/libamdhip64-sanitized.so" ] || ! grep -q -a -m 1 __CLANG_OFFLOAD_BUNDLE__ "$build/hip/kernels.hipfb"; then
    echo "1..0 # SKIP this build has no sanitized shim, or no kernels"
    exit 0
fi
# The programs are not instrumented: the library's runtime must be there before they are.
runtime=$(${CC:-cc} -print-file-name=libasan.so)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

run() { # name
    env LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0 HIP_TEST_ONLY=sanitized CMOCKA_MESSAGE_OUTPUT=TAP "$build/tests/hip/test_hip_$1" >"$logs/$1" 2>&1
    echo $? >"$logs/$1.status"
}

# The longest beside the others.
run attn &
for name in delta hold mat moe tile; do
    run $name
done
wait

number=0
failures=0
for name in attn delta hold mat moe tile; do
    number=$((number + 1))
    if [ "$(cat "$logs/$name.status")" -eq 0 ] && grep -q '^ *ok ' "$logs/$name"; then
        echo "ok $number - test_hip_$name is clean under the address and undefined-behaviour sanitizers"
    else
        echo "not ok $number - test_hip_$name is clean under the address and undefined-behaviour sanitizers"
        failures=$((failures + 1))
        grep '^ *not ok ' "$logs/$name" | sed 's/^ */# /'
        grep -A 12 'ERROR: AddressSanitizer\|runtime error' "$logs/$name" | sed 's/^/# /' | head -40
    fi
done
echo "1..$number"
[ "$failures" -eq 0 ]
