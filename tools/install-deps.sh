#!/bin/sh
# Installs the distribution packages that building, running and testing need, and says which. Does nothing when all are there.
# Debian 12, Ubuntu 24.04 and newer. Elsewhere: install the packages' equivalents and this script only checks for pkg-config.
# usage: install-deps.sh [--no-gpu]     --no-gpu: not the compiler for the GPU's kernels (some 330 MB), which nobody needs who has no such GPU
set -eu
packages="gcc g++ make pkg-config libc6-dev libmicrohttpd-dev libjansson-dev libuv1-dev libunistring-dev libsodium-dev libcmocka-dev curl"
# For the GPU's kernels (clang 19 or newer). Without them everything else builds, and the server runs on the CPU.
gpu_packages="clang-19 lld-19 llvm-19 clang-tools-19"
[ "${1:-}" != --no-gpu ] || gpu_packages=""

missing=""
gpu_missing=""
if command -v dpkg-query >/dev/null 2>&1; then
    for p in $packages $gpu_packages; do
        case $(dpkg-query -W -f='${Status}' "$p" 2>/dev/null || true) in
            "install ok installed") ;;
            *) case " $gpu_packages " in *" $p "*) gpu_missing="$gpu_missing $p" ;; *) missing="$missing $p" ;; esac ;;
        esac
    done
elif ! pkg-config --exists libmicrohttpd jansson libuv libsodium 2>/dev/null; then
    echo "bedside needs: $packages (or your distribution's names for them)" >&2
    exit 1
fi
# Another compiler that can do it is as good.
[ -z "$gpu_missing" ] || [ -z "$("$(dirname "$0")/find-hipcc.sh")" ] || gpu_missing=""
[ -n "$missing$gpu_missing" ] || exit 0

sudo=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || {
        [ -z "$gpu_missing" ] || echo "bedside: no GPU kernels without these packages; install them as root:$gpu_missing" >&2
        [ -n "$missing" ] || exit 0
        echo "bedside needs these packages; install them as root:$missing" >&2
        exit 1
    }
    sudo=sudo
fi
export DEBIAN_FRONTEND=noninteractive

# A fresh machine may have no package lists yet.
install() {
    echo "bedside: installing $*"
    $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 || {
        $sudo apt-get update -qq
        $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    }
}
# shellcheck disable=SC2086
[ -z "$missing" ] || install $missing
# shellcheck disable=SC2086
[ -z "$gpu_missing" ] || install $gpu_missing || echo "bedside: these packages cannot be had, so this build has no GPU kernels:$gpu_missing" >&2
