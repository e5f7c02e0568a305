#!/bin/sh
# `bedside bench`, end to end: what it prints, and that its numbers agree with each other. No number is held against a clock. Writes TAP.
set -u
program=${BEDSIDE:-build/bedside}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
number=0
failures=0
model=tests/demo-model/demo-q8_0.gguf
unset BEDSIDE
for name in $(env | sed -n 's/^\(BEDSIDE_[A-Z_]*\)=.*/\1/p'); do
    unset "$name"
done

# bench STATUS words...: must end with that status; its output is in $scratch/out, its messages in $scratch/err.
bench() {
    wanted=$1
    shift
    "$program" bench --device cpu "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    got=$?
    [ "$got" -eq "$wanted" ] || { echo "# bench $*: status $got, not $wanted"; sed 's/^/# /' "$scratch/err"; return 1; }
}

out_has() {
    grep -qF -- "$1" "$scratch/out" || { echo "# no '$1' in the output:"; sed 's/^/# /' "$scratch/out"; return 1; }
}

err_has() {
    grep -qF -- "$1" "$scratch/err" || { echo "# no '$1' in the messages:"; sed 's/^/# /' "$scratch/err"; return 1; }
}

# field NAME: its numbers in the JSON output, one a line, in order.
field() {
    grep -o "\"$1\":[0-9.]*" "$scratch/out" | sed 's/.*://'
}

# promise FUNCTION: one test.
promise() {
    number=$((number + 1))
    if "$1"; then
        echo "ok $number - $1"
    else
        echo "not ok $number - $1"
        failures=$((failures + 1))
    fi
}

# A row has eight numbers: clients, two speeds of writing, one of reading, two times to the first token, three between tokens.
a_row_for_each_number_of_clients_with_numbers_that_agree() {
    bench 0 --model $model --clients 1,3 --prompt-tokens 70 --answer-tokens 12 --requests 2 --threads 1 || return 1
    sed -n 's/|/ /g; /^ *[0-9][0-9]*  *[0-9][0-9.]* /p' "$scratch/out" | awk '
        { if (NF != 9) { print "# " NF " numbers: " $0; bad = 1 }
          if ($2 <= 0 || $3 <= 0 || $4 <= 0 || $5 <= 0 || $7 < 0 || $9 <= 0) { print "# not above 0: " $0; bad = 1 }
          if ($5 > $6 || $7 > $8 || $8 > $9) { print "# percentiles fall: " $0; bad = 1 }
          rows = rows " " $1 }
        END { if (rows != " 1 3") { print "# rows:" rows; bad = 1 }; exit bad }'
}

it_says_what_ran_and_what_the_numbers_depend_on() {
    out_has 'Tiny clinical demo' && out_has 'backend  cpu, 1 threads' && out_has 'prompts of 70 random tokens, answers of 12' &&
        out_has 'depend on what else the machine does' && [ ! -s "$scratch/err" ]
}

every_answer_is_as_long_as_asked_for() {
    bench 0 --model $model --clients 2,1 --prompt-tokens 65 --answer-tokens 100 --requests 3 --json || return 1
    [ "$(field clients | tr '\n' ' ')" = "2 1 " ] && [ "$(field requests | tr '\n' ' ')" = "6 3 " ] &&
        [ "$(field answer_tokens | tr '\n' ' ')" = "100 600 300 " ] && [ "$(field prompt_tokens | tr '\n' ' ')" = "65 390 195 " ]
}

json_is_one_document_and_has_every_figure() {
    for name in total_tok_s client_tok_s prefill_tok_s p50 p95 max seconds; do
        field $name | awk -v name=$name '$1 <= 0 { print "# " name " is " $1; bad = 1 } END { exit bad || !NR }' || return 1
    done
    [ "$(head -c 1 "$scratch/out")" = "{" ] && [ "$(tail -n 1 "$scratch/out")" = "]}" ] && [ "$(field pauses | tr '\n' ' ')" = "0 0 " ] &&
        { ! command -v node >/dev/null || node -e 'JSON.parse(require("fs").readFileSync(0, "utf8"))' <"$scratch/out"; }
}

an_answer_of_one_token_has_no_gaps() {
    bench 0 --model $model --clients 2 --prompt-tokens 1 --answer-tokens 1 --requests 1 --json && out_has '"between_tokens_ms":{"p50":0.000,"p95":0.000,"max":0.000}'
}

little_memory_shows_as_pauses() { # beside three states half a MiB is left for keys and values: some 450 tokens, where three requests need 762
    bench 0 --model $model --clients 3 --context 256 --prompt-tokens 64 --answer-tokens 190 --requests 1 --kv-memory 5 --json &&
        field pauses | awk '$1 < 1 { print "# " $1 " pauses"; exit 1 }'
}

a_bad_list_of_clients_is_refused_by_name() {
    for list in '' , 1, ,1 1,,2 0 1,0 257 -1 two 1,2x '1 2' 99999999999999999999 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17; do
        bench 2 --model $model --clients "$list" && err_has "clients: " && err_has "like 1,2,4,8" && [ ! -s "$scratch/out" ] ||
            { echo "# the list '$list'"; return 1; }
    done
    bench 2 --model $model --clients 4,two,1 && err_has "'two' (item 2)"
}

what_cannot_be_run_is_refused_with_the_remedy() {
    bench 2 --clients 1 && err_has "--model FILE" && bench 2 --model $model word && err_has "no words" &&
        bench 2 --model $model --answer-tokens 0 && err_has "1 to 65536" && bench 2 --model $model --requests 0 && err_has "1 to 1000" &&
        bench 1 --model "$scratch/absent.gguf" && err_has "No such file" &&
        bench 1 --model $model --context 128 --prompt-tokens 100 --answer-tokens 29 && err_has "(--context)" &&
        bench 0 --model $model --context 128 --prompt-tokens 100 --answer-tokens 28 --clients 1 --requests 1
}

writing_to_a_full_disk_is_an_error() {
    [ -e /dev/full ] || return 0
    ! "$program" bench --model $model --clients 1 --prompt-tokens 2 --answer-tokens 2 >/dev/full 2>"$scratch/err" && err_has "standard output"
}

promise a_row_for_each_number_of_clients_with_numbers_that_agree
promise it_says_what_ran_and_what_the_numbers_depend_on
promise every_answer_is_as_long_as_asked_for
promise json_is_one_document_and_has_every_figure
promise an_answer_of_one_token_has_no_gaps
promise little_memory_shows_as_pauses
promise a_bad_list_of_clients_is_refused_by_name
promise what_cannot_be_run_is_refused_with_the_remedy
promise writing_to_a_full_disk_is_an_error
echo "1..$number"
[ "$failures" -eq 0 ]
