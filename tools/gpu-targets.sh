#!/bin/sh
# The instruction sets of this machine's AMD GPUs, such as "gfx1152", as far as the kernel's driver tells: what kernels to compile for. Nothing without one.
# usage: tools/gpu-targets.sh [/sys/class/kfd/kfd/topology/nodes]
nodes=${1:-/sys/class/kfd/kfd/topology/nodes}
# gfx_target_version is major * 10000 + minor * 100 + stepping, 0 for a CPU; the stepping is written in hexadecimal.
cat "$nodes"/*/properties 2>/dev/null | awk '
    $1 == "gfx_target_version" && $2 > 0 {
        name = sprintf("gfx%d%d%x", $2 / 10000, $2 / 100 % 100, $2 % 100)
        if (!seen[name]++)
            list = list (list ? " " : "") name
    }
    END { if (list) print list }'
