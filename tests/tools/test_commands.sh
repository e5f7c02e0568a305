#!/bin/sh
# The command line, end to end: help, version, inspect, tokenize. Writes TAP. BEDSIDE names the program.
set -u
program=${BEDSIDE:-build/bedside}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
number=0
failures=0
unset BEDSIDE
for name in $(env | sed -n 's/^\(BEDSIDE_[A-Z_]*\)=.*/\1/p'); do
    unset "$name"
done

# run STATUS words...: the program must end with that status; its output is in $scratch/out, its messages in $scratch/err.
run() {
    wanted=$1
    shift
    "$program" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    got=$?
    [ "$got" -eq "$wanted" ] || { echo "# $*: status $got, not $wanted"; sed 's/^/# /' "$scratch/err"; return 1; }
}

out_has() {
    grep -qF -- "$1" "$scratch/out" || { echo "# no '$1' in the output"; return 1; }
}

err_has() {
    grep -qF -- "$1" "$scratch/err" || { echo "# no '$1' in the messages:"; sed 's/^/# /' "$scratch/err"; return 1; }
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

without_a_command_the_help_is_shown_as_an_error() {
    run 2 && err_has "bedside serve" && [ ! -s "$scratch/out" ]
}

help_goes_to_standard_output() {
    for word in help --help -h; do
        run 0 "$word" && out_has "bedside serve" && out_has "--max-queue" || return 1
    done
}

the_readme_table_is_printed() {
    run 0 help --markdown && out_has '| `--port` | `BEDSIDE_PORT` | 8080 | 0 to 65535 |'
}

the_version_is_shown() {
    run 0 version && grep -qE '^bedside [0-9]+\.[0-9]+\.[0-9]+$' "$scratch/out" && run 0 --version
}

an_unknown_command_is_named() {
    run 2 server && err_has "'server' is not a command"
}

inspect_shows_metadata_and_totals_and_that_it_is_served() {
    run 0 inspect tests/demo-model/demo-q4_k_m.gguf && out_has 'general.architecture  string  "qwen35moe"' &&
        out_has 'tokenizer.ggml.tokens  string[4096]' && out_has 'bedside serves this file: architecture qwen35moe' &&
        out_has 'qwen35moe.attention.layer_norm_rms_epsilon  f32  1e-06' && grep -qE '^Q4_K +49 +13506560 +7597440 ' "$scratch/out" &&
        ! grep -q '^token_embd.weight' "$scratch/out"
}

inspect_lists_tensors_when_asked() {
    run 0 inspect --tensors tests/data/tiny-qwen3-q8_0.gguf && grep -qE '^blk.3.ffn_up.weight +Q8_0 +64 x 192 +13056 +391040$' "$scratch/out"
}

every_line_of_inspect_is_one_line() { # the chat template has newlines in it
    run 0 inspect tests/demo-model/demo-q4_k_m.gguf && [ "$(grep -c 'tokenizer.chat_template' "$scratch/out")" -eq 1 ] &&
        ! LC_ALL=C grep -q "$(printf '[\001-\010\013-\037]')" "$scratch/out"
}

inspect_says_what_is_wrong_with_a_file() {
    head -c 300000 tests/data/tiny-qwen3-q8_0.gguf >"$scratch/cut.gguf"
    run 1 inspect "$scratch/cut.gguf" && err_has "$scratch/cut.gguf" && err_has "need 549248 bytes, it has 300000" &&
        run 1 inspect "$scratch/absent.gguf" && err_has "No such file" &&
        run 1 inspect tests && err_has "directory" && run 2 inspect && run 2 inspect --tensor x && err_has "'--tensor' is not expected"
}

model=tests/demo-model/demo-q4_k_m.gguf

tokenize_prints_ids_and_pieces() {
    run 0 tokenize --model $model 'Aspirin 81 mg' && out_has '    3878  "Aspirin"' && out_has '5 tokens'
}

tokenize_reads_standard_input_and_prints_bare_ids() {
    printf 'Aspirin 81 mg' | "$program" tokenize --model $model --ids-only >"$scratch/out" 2>&1 && run 0 tokenize --model $model 'Aspirin 81 mg' &&
        [ "$(sed -n 's/^ *\([0-9]*\)  ".*/\1/p' "$scratch/out" | wc -l)" -eq 5 ] &&
        "$program" tokenize --ids-only --model $model Aspirin 81 mg >"$scratch/words" &&
        printf 'Aspirin 81 mg' | "$program" tokenize --model $model --ids-only | cmp -s - "$scratch/words"
}

text_becomes_a_control_token_only_when_asked() {
    run 0 tokenize --model $model '<|im_start|>user' && ! grep -q control "$scratch/out" &&
        run 0 tokenize --model $model --special '<|im_start|>user' && out_has '"<|im_start|>"  (control)' && out_has '2 tokens'
}

tokenize_normalises_unless_told_not_to() { # e + combining acute
    decomposed=$(printf 'e\314\201')
    run 0 tokenize --model $model "$decomposed" && out_has '"é"' && run 0 tokenize --model $model --no-nfc "$decomposed" && ! grep -q '"é"' "$scratch/out"
}

tokenize_says_what_it_misses() {
    run 2 tokenize hello && err_has "--model FILE" && run 2 tokenize --modle $model hello && err_has "did you mean --model?" &&
        run 1 tokenize --model "$scratch/absent.gguf" hello && err_has "No such file" &&
        BEDSIDE_MODEL=$model "$program" tokenize hello >"$scratch/out" && out_has tokens && run 0 tokenize --help && out_has --special
}

# tiny-qwen3 keeps the keys and values of 2 heads of 32 in 6 layers: a MiB holds 320 tokens as f32, 640 as f16, 1280 as q8_0.
a_kv_type_decides_how_much_context_fits() {
    set -- run --model tests/data/tiny-qwen3-q8_0.gguf --prompt Aspirin --max-tokens 2 --kv-memory 1
    run 0 "$@" --context 320 --kv-type f32 && run 1 "$@" --context 321 --kv-type f32 && err_has kv-memory &&
        run 0 "$@" --context 640 && run 1 "$@" --context 641 && run 0 "$@" --context 640 --kv-type f16 && run 1 "$@" --context 641 --kv-type f16 &&
        run 0 "$@" --context 1280 --kv-type q8_0 && run 1 "$@" --context 1281 --kv-type q8_0 && err_has kv-memory &&
        run 2 "$@" --kv-type q4_0 && err_has 'f16|q8_0|f32'
}

writing_to_a_full_disk_is_an_error() {
    [ -e /dev/full ] || return 0
    ! "$program" inspect $model >/dev/full 2>"$scratch/err" && err_has "No space left" &&
        ! "$program" tokenize --model $model hello >/dev/full 2>"$scratch/err" && err_has "No space left"
}

a_key_for_a_cache_that_is_not_on_disk_is_refused() {
    run 1 serve --model tests/demo-model/demo-q8_0.gguf --port 0 --cache-key /dev/null && err_has "--cache-dir"
}

# Waits until the server that writes to $scratch/out listens, half a minute at most.
# The shell goes on before a command behind & has emptied its output file, so whoever starts one empties it first: the last server's line is no answer.
until_listening() {
    for _ in $(seq 300); do
        grep -q '^listening' "$scratch/out" && return
        sleep 0.1
    done
}

# serve_limited HARD SOFT N: serves N connections under limits of open files until it listens; its own limit is in $scratch/limit.
serve_limited() {
    : >"$scratch/out"
    (ulimit -S -n "$2" && ulimit -H -n "$1" && exec "$program" serve --model tests/demo-model/demo-q8_0.gguf --port 0 --kv-memory 64 --max-connections "$3") \
        >"$scratch/out" 2>"$scratch/err" </dev/null &
    pid=$!
    until_listening
    sed -n 's/^Max open files *\([0-9]*\).*/\1/p' "/proc/$pid/limits" >"$scratch/limit"
    kill "$pid"
    wait "$pid"
}

the_usual_limit_of_open_files_does_not_limit_connections() {
    serve_limited 1000 100 300 && [ "$(cat "$scratch/limit")" -gt 600 ] && ! grep -q max-connections "$scratch/err" &&
        serve_limited 200 100 300 && [ "$(cat "$scratch/limit")" -eq 200 ] && err_has "--max-connections 300"
}

# What is in memory is somebody's record. Where core files go to the folder (see the control), none may appear; elsewhere the limit must be the one that stops collectors.
a_crash_leaves_no_copy_of_memory_behind() {
    mkdir -p "$scratch/crash" "$scratch/control"
    here=$PWD
    (cd "$scratch/control" && ulimit -c unlimited && exec sh -c 'kill -SEGV $$') 2>/dev/null
    case $program in /*) crashing=$program ;; *) crashing=$here/$program ;; esac
    : >"$scratch/out"
    (cd "$scratch/crash" && ulimit -c unlimited && exec "$crashing" serve --model "$here/tests/demo-model/demo-q8_0.gguf" --port 0 --kv-memory 64) \
        >"$scratch/out" 2>"$scratch/err" </dev/null &
    pid=$!
    until_listening
    sed -n 's/^Max core file size *\([0-9]*\) *\([0-9]*\).*/\1 \2/p' "/proc/$pid/limits" >"$scratch/limit"
    kill -SEGV "$pid"
    wait "$pid" 2>/dev/null
    [ $? -eq 139 ] || { echo "# it did not crash"; return 1; }
    [ "$(cat "$scratch/limit")" = "1 1" ] || { echo "# the limit is $(cat "$scratch/limit")"; return 1; }
    [ -z "$(ls "$scratch/control")" ] || [ -z "$(ls "$scratch/crash")" ] || { echo "# $(ls "$scratch/crash")"; return 1; }
}

# With a hard limit of 0, which an ordinary user cannot raise to 1, a collector would be started: the process must have said that it is not to be dumped. Then what
# the kernel tells of it belongs to root.
a_crash_is_not_collected_where_core_files_were_forbidden_before() {
    if [ "$(id -u)" -eq 0 ]; then
        as_user="setpriv --reuid 65534 --regid 65534 --clear-groups"
        $as_user "$program" --version >/dev/null 2>&1 || { echo "# no other user can start $program"; return 0; }
    else
        as_user=
    fi
    : >"$scratch/out"
    # (a leak detector would want to look at it as a debugger does)
    ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0 $as_user sh -c 'ulimit -c 0 && exec "$@"' sh "$program" serve --model tests/demo-model/demo-q8_0.gguf \
        --port 0 --kv-memory 64 >"$scratch/out" 2>"$scratch/err" </dev/null &
    pid=$!
    until_listening
    owner=$(stat -c %u "/proc/$pid/maps")
    kill "$pid"
    wait "$pid" || return 1
    out_has listening && [ "$owner" = 0 ] || { echo "# /proc/$pid/maps belonged to user $owner"; return 1; }
}

# What is installed starts as the service says, with the settings that are installed beside it; they are the user's and stay.
the_installed_service_starts_and_keeps_its_settings() {
    root=$scratch/root
    build=${program%/bedside}
    install="make --no-print-directory -s -o all BUILD=$build DESTDIR=$root PREFIX=/opt/b"
    $install install >"$scratch/out" 2>&1 || { sed 's/^/# /' "$scratch/out"; return 1; }
    unit=$root/opt/b/lib/systemd/system/bedside.service
    if command -v systemd-analyze >/dev/null; then
        sed "s|ExecStart=/opt/b|ExecStart=$(readlink -f "$root")/opt/b|" "$unit" >"$scratch/bedside.service"
        systemd-analyze verify --man=no "$scratch/bedside.service" >"$scratch/err" 2>&1 || { sed 's/^/# /' "$scratch/err"; return 1; }
        ! grep bedside.service "$scratch/err" || return 1
    fi
    printf 'model = tests/demo-model/demo-q8_0.gguf\nport = 0\nkv-memory = 64\n' >>"$root/etc/bedside.conf"
    command=$(sed -n 's/^ExecStart=//p' "$unit" | sed "s| /etc/| $root/etc/|; s|^|$root|")
    # A flag would overrule what the settings say.
    [ "${command#*serve }" = "--config $root/etc/bedside.conf" ] || { echo "# $command"; return 1; }
    mkdir -p "$scratch/state"
    sed -i "s| /var/lib/| $scratch/state/|" "$root/etc/bedside.conf"
    : >"$scratch/out"
    $command >"$scratch/out" 2>"$scratch/err" </dev/null &
    pid=$!
    until_listening
    kill "$pid"
    wait "$pid" || return 1
    out_has listening && [ -d "$scratch/state/bedside" ] || return 1
    $install install && grep -q 'kv-memory = 64' "$root/etc/bedside.conf" || { echo "# settings were overwritten"; return 1; }
    $install uninstall >/dev/null && [ "$(cd "$root" && find . -type f)" = ./etc/bedside.conf ]
}

make_run_takes_a_file_whose_name_has_spaces() {
    printf 'no model' >"$scratch/a b.gguf"
    make --no-print-directory -s run BUILD="$scratch" MODEL="$scratch/a b.gguf" -n >"$scratch/out" 2>&1
    out_has "--model \"$scratch/a b.gguf\""
}

make_run_serves_the_model_of_the_environment() {
    run_of="make --no-print-directory -s run BUILD=$scratch -n"
    BEDSIDE_MODEL=/a.gguf $run_of >"$scratch/out" 2>&1
    out_has '--model "/a.gguf"' || return 1
    BEDSIDE_MODEL=/a.gguf $run_of MODEL=/b.gguf >"$scratch/out" 2>&1
    out_has '--model "/b.gguf"'
}

an_option_of_another_command_is_refused_by_name() {
    model=tests/demo-model/demo-q8_0.gguf
    run 2 serve --model $model --no-think && err_has '--no-think is only for bedside run' || return 1
    run 2 serve --model $model --clients 3 && err_has '--clients is only for bedside bench' || return 1
    run 2 run --model $model --json Hello && err_has '--json is only for bedside bench' || return 1
    run 2 bench --model $model --seed 1 && err_has '--seed is only for bedside run'
}

make_run_compiles_for_the_gpus_that_are_there() {
    for node in 0:0 1:110502 2:120001 3:110502 4:90012; do
        mkdir -p "$scratch/nodes/${node%%:*}"
        printf 'cpu_cores_count 8\ngfx_target_version %s\n' "${node#*:}" >"$scratch/nodes/${node%%:*}/properties"
    done
    [ "$(tools/gpu-targets.sh "$scratch/nodes")" = "gfx1152 gfx1201 gfx90c" ] || { echo "# $(tools/gpu-targets.sh "$scratch/nodes")"; return 1; }
    [ -z "$(tools/gpu-targets.sh "$scratch/none")" ] || return 1
    make --no-print-directory -s run BUILD="$scratch" HIP_TARGETS="gfx1100 gfx1152" -n >"$scratch/out" 2>&1
    out_has 'HIP_TARGETS="gfx1100 gfx1152"' && ! grep -q 'install-deps.sh --no-gpu' "$scratch/out" || return 1
    make --no-print-directory -s run BUILD="$scratch" HIP_TARGETS= -n >"$scratch/out" 2>&1 # no compiler for a GPU that is not there
    out_has 'install-deps.sh --no-gpu'
}

promise without_a_command_the_help_is_shown_as_an_error
promise help_goes_to_standard_output
promise the_readme_table_is_printed
promise the_version_is_shown
promise an_unknown_command_is_named
promise inspect_shows_metadata_and_totals_and_that_it_is_served
promise inspect_lists_tensors_when_asked
promise every_line_of_inspect_is_one_line
promise inspect_says_what_is_wrong_with_a_file
promise tokenize_prints_ids_and_pieces
promise tokenize_reads_standard_input_and_prints_bare_ids
promise text_becomes_a_control_token_only_when_asked
promise tokenize_normalises_unless_told_not_to
promise tokenize_says_what_it_misses
promise a_kv_type_decides_how_much_context_fits
promise writing_to_a_full_disk_is_an_error
promise a_key_for_a_cache_that_is_not_on_disk_is_refused
promise the_usual_limit_of_open_files_does_not_limit_connections
promise a_crash_leaves_no_copy_of_memory_behind
promise a_crash_is_not_collected_where_core_files_were_forbidden_before
promise the_installed_service_starts_and_keeps_its_settings
promise make_run_takes_a_file_whose_name_has_spaces
promise make_run_serves_the_model_of_the_environment
promise an_option_of_another_command_is_refused_by_name
promise make_run_compiles_for_the_gpus_that_are_there
echo "1..$number"
[ "$failures" -eq 0 ]
