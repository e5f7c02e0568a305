#!/bin/sh
# bedside doctor from the command line: its exit status and what it takes. Writes TAP. BEDSIDE names the program.
set -u
program=${BEDSIDE:-build/bedside}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset BEDSIDE
for name in $(env | sed -n 's/^\(BEDSIDE_[A-Z_]*\)=.*/\1/p'); do
    unset "$name"
done
number=0
failures=0
echo 1..4

promise() {
    number=$((number + 1))
    if "$1"; then
        echo "ok $number - $1"
    else
        echo "not ok $number - $1"
        sed 's/^/# /' "$scratch/out" "$scratch/err"
        failures=$((failures + 1))
    fi
}

run() { # STATUS words...
    wanted=$1
    shift
    "$program" doctor "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    [ $? -eq "$wanted" ]
}

without_a_gpu_the_status_is_1_and_the_report_says_why() {
    run 1 --hip-library "$scratch/none.so" && grep -qF "$scratch/none.so" "$scratch/out" && grep -q 'The GPU cannot be used' "$scratch/out" && [ ! -s "$scratch/err" ]
}

a_wrong_option_has_status_2() {
    run 2 --device gpu && grep -qF 'auto|cpu|hip|hip:N' "$scratch/err" && run 2 word
}

a_model_that_cannot_be_read_is_named() {
    run 1 --model "$scratch/none.gguf" && grep -qF none.gguf "$scratch/err"
}

the_help_names_the_command() {
    "$program" --help >"$scratch/out" 2>"$scratch/err" && grep -q '^  bedside doctor ' "$scratch/out" && run 0 --help
}

promise without_a_gpu_the_status_is_1_and_the_report_says_why
promise a_wrong_option_has_status_2
promise a_model_that_cannot_be_read_is_named
promise the_help_names_the_command
[ "$failures" -eq 0 ]
