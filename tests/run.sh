#!/bin/sh
# Runs every test program of a build and the client tests, and ends with "N passed, N failed, N skipped".
# usage: tests/run.sh BUILD [name...]     (names: only test programs whose path contains one of them)
set -u
cd "$(dirname "$0")/.." || exit 2
build=$1
shift
log=$(mktemp)
trap 'rm -f "$log" "$log.one"' EXIT
: >"$log"
failed_programs=0

wanted() { # path name...
    path=$1
    shift
    [ $# -eq 0 ] && return 0
    for name in "$@"; do
        case $path in *"$name"*) return 0 ;; esac
    done
    return 1
}

# One program that writes TAP. A crash counts as a failure of its own.
run_tap() { # label command...
    label=$1
    shift
    start=$(date +%s)
    "$@" >"$log.one" 2>&1
    rc=$?
    ok=$(grep '^ *ok ' "$log.one" | grep -cv '# SKIP')
    bad=$(grep '^ *not ok ' "$log.one" | grep -cv '# SKIP') # cmocka writes a skipped test as "not ok N # SKIP"
    skip=$(grep '^ *\(not \)\{0,1\}ok ' "$log.one" | grep -c '# SKIP')
    echo "$label: $ok ok, $bad not ok, $skip skipped ($(($(date +%s) - start)) s)"
    [ "$skip" -eq 0 ] || grep '# SKIP' "$log.one"
    if [ $rc -ne 0 ] || [ "$bad" -ne 0 ] || [ $((ok + skip)) -eq 0 ]; then
        grep '^ *not ok ' "$log.one" | grep -v '# SKIP' | sed 's/^ */    FAILED: /'
        sed 's/^/    /' "$log.one" | tail -n 80
        if [ "$bad" -eq 0 ]; then
            echo "    $label: exit status $rc, $ok tests"
            failed_programs=$((failed_programs + 1))
        fi
    fi
    cat "$log.one" >>"$log"
}

for source in tests/unit/test_*.c tests/golden/test_*.c; do
    program=$build/${source%.c}
    wanted "$source" "$@" || continue
    run_tap "${source%.c}" env CMOCKA_MESSAGE_OUTPUT=TAP "$program"
done

skipped=0
# The GPU's tests: with BEDSIDE_HIP_TESTS=all (make test-hip) in full length.
for source in tests/hip/test_*.c tests/hip/test_*.cpp; do
    [ -e "$source" ] || continue
    wanted "$source" "$@" || continue
    if [ "$source" != tests/hip/test_shim.cpp ] && ! grep -q -a -m 1 __CLANG_OFFLOAD_BUNDLE__ "$build/hip/kernels.hipfb" 2>/dev/null; then
        echo "${source%.c*}: skipped, this build has no GPU kernels (package clang-19)"
        skipped=$((skipped + 1))
        continue
    fi
    run_tap "${source%.c*}" env CMOCKA_MESSAGE_OUTPUT=TAP BUILD="$build" "$build/${source%.c*}"
done

node_major=$( (node --version 2>/dev/null || echo v0) | sed 's/^v\([0-9]*\).*/\1/')
for source in tests/http/test_*.mjs; do
    [ -e "$source" ] || continue
    wanted "$source" "$@" || continue
    if [ "$node_major" -lt 20 ]; then
        echo "$source: skipped, needs node 20 or newer"
        skipped=$((skipped + 1))
        continue
    fi
    if [ ! -d tests/http/node_modules ]; then
        (cd tests/http && npm ci --no-audit --no-fund >"$log.one" 2>&1) || cat "$log.one"
    fi
    if [ ! -d tests/http/node_modules/openai ]; then
        echo "$source: skipped, its npm packages cannot be had"
        skipped=$((skipped + 1))
        continue
    fi
    run_tap "${source%.mjs}" env BEDSIDE="$build/bedside" node --test --test-reporter=tap "$source"
done

for source in tests/http/test_*.sh tests/tools/test_*.sh tests/hip/test_*.sh; do
    [ -e "$source" ] || continue
    wanted "$source" "$@" || continue
    run_tap "${source%.sh}" env BEDSIDE="$build/bedside" BUILD="$build" sh "$source"
done

passed=$(grep '^ok ' "$log" | grep -cv '# SKIP')
failed=$(($(grep '^not ok ' "$log" | grep -cv '# SKIP') + failed_programs))
skipped=$((skipped + $(grep '^\(not \)\{0,1\}ok ' "$log" | grep -c '# SKIP')))
grep '^not ok ' "$log" | grep -v '# SKIP'
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
