#!/bin/sh
# Style and static checks: clang-format, clang-tidy and cppcheck, each on a fixed rule file. Ends with status 1 on any finding, 2 when a tool
# is missing.
# usage: tools/check.sh [file.c|file.h...]     (default: every C file of the project)
set -u
cd "$(dirname "$0")/.." || exit 2

missing=
for tool in clang-format clang-tidy cppcheck pkg-config; do
    command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    echo "make check needs$missing: apt install$missing" >&2
    exit 2
fi

if [ $# -gt 0 ]; then
    files=$(printf '%s\n' "$@")
else
    # tests/demo-model and tests/reference hold the tools that made the test data; they are not part of the program.
    files=$(find api base config engine hip server tests -name '*.[ch]' ! -path 'tests/demo-model/*' ! -path 'tests/reference/*' \
        ! -path '*/node_modules/*' | LC_ALL=C sort)
fi
sources=$(printf '%s\n' "$files" | grep '\.c$')
findings=0

# name, then the command; its output is shown when it fails.
check() {
    name=$1
    shift
    if output=$("$@" 2>&1); then
        echo "$name: no findings"
    else
        printf '%s\n' "$output"
        echo "$name: FINDINGS"
        findings=$((findings + 1))
    fi
}

flags="-std=c17 -D_GNU_SOURCE -I. -Wall -Wextra -Wshadow $(pkg-config --cflags libmicrohttpd jansson libuv 2>/dev/null)"

# Two files at a time; the notes on suppressed warnings are left out. The emulator computes with _Float16, which clang 14 knows only beside
# AVX512-FP16.
tidy() {
    printf '%s\n' $sources | xargs -P 2 -n 1 sh -c '
        case $2 in
        *_avx2.c) isa="-mavx2 -mfma -mf16c" ;;
        *_avx512.c) isa="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c" ;;
        *tests/hip/emu/*.c | *tests/hip/test_emulator.c) isa="-mavx512fp16" ;;
        *) isa= ;;
        esac
        out=$(clang-tidy --quiet "$2" -- $1 $isa 2>&1) && exit 0
        printf "%s\n" "$out" | grep -v "^[0-9]* warnings* \(generated\|treated\)"
        exit 1' tidy "$flags"
}

# shellcheck disable=SC2086
check clang-format clang-format --dry-run -Werror $files
if [ -n "$sources" ]; then
    check clang-tidy tidy
    # shellcheck disable=SC2086
    check cppcheck cppcheck --quiet --std=c11 --language=c --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
        --suppressions-list=tools/cppcheck.txt --template='{file}:{line}: {severity}: {message} [{id}]' -D_GNU_SOURCE -D__x86_64__ -D__linux__ \
        "-Djson_array_foreach(a,i,v)=while ((v = json_array_get(a, i)))" \
        "-Djson_object_foreach(o,k,v)=while ((v = json_object_get(o, k)))" -I. $sources
fi

[ "$findings" -eq 0 ]
