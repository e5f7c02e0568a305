#!/bin/sh
# AMD's own runtime library on a machine without its GPU: every function is found, the message is clear, and the CPU serves. Uses an installed libamdhip64, or
# fetches Debian's packages into the build folder; skipped where neither works, and where there is a GPU. Writes TAP. BEDSIDE names the program.
set -u
program=${BEDSIDE:-build/bedside}
build=${BUILD:-build}
folder=$build/hip/real-runtime
model=tests/demo-model/demo-q8_0.gguf
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for name in $(env | sed -n 's/^\(BEDSIDE_[A-Z_]*\)=.*/\1/p'); do
    unset "$name"
done
echo 1..3

skip_all() {
    for i in 1 2 3; do
        echo "ok $i # SKIP $1"
    done
    exit 0
}

[ -e /dev/kfd ] && skip_all "this machine has a GPU: bedside doctor looks at it"

libraries=
installed() {
    for name in 7 6 5; do
        ldconfig -p 2>/dev/null | grep -qF "libamdhip64.so.$name" && return 0
    done
    return 1
}

# Fetches what is not installed, one package at a time; the archive's own tools check the signatures.
fetch() {
    [ -e "$folder/complete" ] && return 0
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    mkdir -p "$folder/packages" || return 1
    for package in libamdhip64-5 libhsa-runtime64-1 libhsakmt1 libamd-comgr2 libllvm15 libnuma1 libdrm-amdgpu1 libdrm2 libelf1 libz3-4 libedit2 libbsd0 libmd0 libxml2; do
        [ "$(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null)" = "ii " ] && continue
        (cd "$folder/packages" && timeout 120 apt-get download "$package") >"$scratch/fetch" 2>&1 || return 1
    done
    for file in "$folder"/packages/*.deb; do
        dpkg-deb -x "$file" "$folder" || return 1
    done
    touch "$folder/complete"
}

if ! installed; then
    fetch || skip_all "libamdhip64 is not installed and Debian's package libamdhip64-5 cannot be had"
    libraries=$(cd "$folder" && pwd)/usr/lib/x86_64-linux-gnu
fi

number=0
failures=0
promise() {
    number=$((number + 1))
    if "$1"; then
        echo "ok $number - $1"
    else
        echo "not ok $number - $1"
        sed 's/^/# /' "$scratch/out" "$scratch/err" 2>/dev/null
        failures=$((failures + 1))
    fi
}

run() { # STATUS words...
    wanted=$1
    shift
    LD_LIBRARY_PATH=$libraries timeout 120 "$program" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    [ $? -eq "$wanted" ]
}

the_doctor_finds_the_library_with_every_function_and_no_gpu() {
    run 1 doctor && grep -q 'HIP runtime *libamdhip64.so.[567], version' "$scratch/out" && grep -q 'The GPU cannot be used' "$scratch/out" &&
        grep -q '/dev/kfd' "$scratch/out" && ! grep -q 'has no function' "$scratch/out"
}

asking_for_the_gpu_is_an_error_that_says_what_to_look_at() {
    run 1 run --model "$model" --device hip --max-tokens 2 --temperature 0 Hello && grep -q '/dev/kfd' "$scratch/err"
}

device_auto_answers_as_the_cpu_does() {
    run 0 run --model "$model" --device cpu --max-tokens 6 --temperature 0 Hello && cp "$scratch/out" "$scratch/cpu" &&
        run 0 run --model "$model" --max-tokens 6 --temperature 0 --log-level info Hello && grep -q 'device auto: the CPU computes, because' "$scratch/err" &&
        cmp -s "$scratch/out" "$scratch/cpu"
}

promise the_doctor_finds_the_library_with_every_function_and_no_gpu
promise asking_for_the_gpu_is_an_error_that_says_what_to_look_at
promise device_auto_answers_as_the_cpu_does
[ "$failures" -eq 0 ]
