#!/bin/sh
# Gates over the code objects of every target, as built: what a kernel may need and which instructions it must or must not have. Writes TAP.
#
# Mat-vec kernels live on waves in flight: 128 registers let 8 waves run on a SIMD with 1024 of them (the smallest of the targets), 12 where there are 1536.
set -u
cd "$(dirname "$0")/../.." || exit 2
: "${BUILD:=build}"
matvec='^(matvec_[0-9]|moe_(route|up|down)$)'
tiles='^(rows_q|moe_(rows|pair)_q)'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0

tool() { # name: the LLVM tool that belongs to the compiler
    cc=$(tools/find-hipcc.sh)
    for t in "$1-$("${cc:-false}" -dumpversion 2>/dev/null | sed 's/\..*//')" "$1"; do
        command -v "$t" && return
    done
}
readelf=$(tool llvm-readelf)
objdump=$(tool llvm-objdump)

check() { # label: ok when the file bad is empty
    n=$((n + 1))
    if [ -s "$work/bad" ]; then
        echo "not ok $n - $1"
        sort "$work/bad" | uniq -c | sed 's/^/# /' | head -n 30
    else
        echo "ok $n - $1"
    fi
}

gates() { # target
    "$readelf" --notes "$BUILD/hip/$1.hsaco" >"$work/notes"
    "$objdump" -d "$BUILD/hip/$1.hsaco" >"$work/code"
    # one line for each kernel: name, vgprs, spilled vgprs and sgprs, scratch bytes, LDS bytes, wave size; "hidden" lines for hidden arguments
    awk '
        function done() { if (name != "") print "kernel", name, v, vs, ss, scratch, lds, wave, dynamic; name = "" }
        /^  - \.args:/ || /^    \.args:/ { }
        /^  - / { done(); hidden = 0 }
        /\.value_kind: *hidden/ { hidden = 1 }
        /\.name:/ && /^    \./ { name = $2; if (hidden) print "hidden", name }
        /\.vgpr_count:/ { v = $2 } /\.vgpr_spill_count:/ { vs = $2 } /\.sgpr_spill_count:/ { ss = $2 }
        /\.private_segment_fixed_size:/ { scratch = $2 } /\.group_segment_fixed_size:/ { lds = $2 }
        /\.uses_dynamic_stack:/ { dynamic = $2 } /\.wavefront_size:/ { wave = $2 }
        /^amdhsa.target/ { done() }' "$work/notes" >"$work/kernels"
    awk '/^[0-9a-f]+ <.*>:$/ { name = substr($2, 2, length($2) - 3) } /^\t/ { print name, $1 }' "$work/code" | sort | uniq -c >"$work/instructions"

    grep -c '^kernel ' "$work/kernels" >"$work/count"
    sed -n 's/^KERNEL_ENTRY(\([^,]*\),.*/\1/p' hip/kernels/list.h | sort >"$work/listed"
    awk '$1 == "kernel" { print $2 }' "$work/kernels" | sort | comm -3 - "$work/listed" >"$work/bad"
    check "$1: the kernels of hip/kernels/list.h and no others ($(cat "$work/count"))"
    awk '$1 == "kernel" && ($4 > 0 || $5 > 0 || $6 > 0 || $9 != "false") { print $2, "spills", $4, $5, "scratch", $6 }' "$work/kernels" >"$work/bad"
    check "$1: no spills, no scratch"
    awk '$1 == "kernel" && ($8 != 32 || $7 > 65536) { print $2, "wave", $8, "LDS", $7 }' "$work/kernels" >"$work/bad"
    check "$1: waves of 32, at most 64 KiB of LDS"
    awk '$1 == "hidden" { print $2 }' "$work/kernels" >"$work/bad"
    check "$1: no hidden arguments"
    awk '$3 ~ /^(flat_|scratch_|buffer_)/ && $3 !~ /^buffer_(gl[01]_inv|wbinv)/ { print $2, $3 }' "$work/instructions" >"$work/bad"
    check "$1: no flat, scratch or buffer accesses"
    awk -v want="$matvec" '$1 == "kernel" && $2 ~ want && $3 > 128 { print $2, "VGPRs", $3 }' "$work/kernels" >"$work/bad"
    check "$1: eight waves of a mat-vec kernel on a SIMD"
    awk -v want="$matvec" 'FNR == NR { if ($3 ~ /dot4/) has[$2] = 1; next } $1 == "kernel" && $2 ~ want && !has[$2] { print $2 }' \
        "$work/instructions" "$work/kernels" >"$work/bad"
    check "$1: v_dot4 in mat-vec kernels"
    awk -v want="$tiles" 'FNR == NR { if ($3 ~ /^v_wmma/) has[$2] = 1; next } $1 == "kernel" && $2 ~ want && !has[$2] { print $2 }' \
        "$work/instructions" "$work/kernels" >"$work/bad"
    check "$1: v_wmma in tile kernels"
}

if [ -z "$readelf" ] || [ -z "$objdump" ]; then
    echo "ok 1 - gates # SKIP no llvm-readelf or llvm-objdump (package llvm-19)"
    echo 1..1
    exit 0
fi
for target in $(grep -o 'gfx[0-9a-f]*' "$BUILD/hip/targets" 2>/dev/null); do
    [ -e "$BUILD/hip/$target.hsaco" ] || continue
    gates "$target"
done
[ $n -gt 0 ] || { n=1; echo "ok 1 - gates # SKIP no code objects in $BUILD/hip"; }
echo "1..$n"
