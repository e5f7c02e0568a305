#!/bin/sh
# Runs every fuzz target of a build for some seconds each. fuzz_X starts from the files in tests/fuzz/seeds/X and the words in
# tests/fuzz/fuzz_X.dict, where there are such; what the fuzzer learns stays in BUILD/fuzz, so that a second run goes on from there.
# Ends with status 1 when any target found something.
# usage: tests/fuzz/run.sh BUILD SECONDS [target...]
set -u
if [ $# -lt 2 ]; then
    echo "usage: tests/fuzz/run.sh BUILD SECONDS [target...]" >&2
    exit 2
fi
cd "$(dirname "$0")/../.." || exit 2
build=$1
seconds=$2
shift 2
findings=0
ran=0

for source in tests/fuzz/fuzz_*.c; do
    target=$(basename "$source" .c)
    if [ $# -gt 0 ]; then
        case " $* " in *" $target "*) ;; *) continue ;; esac
    fi
    program=$build/tests/fuzz/$target
    corpus=$build/fuzz/$target
    found=$build/fuzz/found
    mkdir -p "$corpus" "$found"
    seeds=tests/fuzz/seeds/${target#fuzz_}
    [ -d "$seeds" ] && cp "$seeds"/* "$corpus"/
    options="-max_total_time=$seconds -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -max_len=16384"
    [ -f "tests/fuzz/$target.dict" ] && options="$options -dict=tests/fuzz/$target.dict"
    # shellcheck disable=SC2086
    if "$program" $options -artifact_prefix="$found/$target-" "$corpus" >"$corpus.log" 2>&1; then
        echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$corpus.log") inputs in $seconds s, no finding"
    else
        echo "$target: FOUND SOMETHING; the input is in $found, the log is $corpus.log"
        tail -n 40 "$corpus.log" | sed 's/^/    /'
        findings=$((findings + 1))
    fi
    ran=$((ran + 1))
done
echo "$ran fuzz targets, $findings with findings"
[ "$findings" -eq 0 ] && [ "$ran" -gt 0 ]
