#!/bin/sh
# Prints the first clang++ (19 or newer) that compiles for AMD GPUs, with its linker and bundler; nothing when there is none. HIPCC in the environment wins.
for cc in ${HIPCC:-clang++-19 clang++-20 clang++-21 clang++-22 clang++ /opt/rocm/llvm/bin/clang++}; do
    command -v "$cc" >/dev/null 2>&1 || continue
    major=$("$cc" -dumpversion 2>/dev/null | sed 's/\..*//')
    [ "${major:-0}" -ge 19 ] || continue
    echo '__attribute__((global)) void f() {}' | "$cc" -x hip --offload-arch=gfx1152 --offload-device-only --no-gpu-bundle-output -nogpuinc -nogpulib \
        -o /dev/null - >/dev/null 2>&1 || continue
    command -v "$("$cc" -print-prog-name=clang-offload-bundler)" >/dev/null 2>&1 || continue
    echo "$cc"
    exit 0
done
