#!/bin/sh
# Installs the distribution packages that building, running and testing need, and says which. Does nothing when all are there.
# Debian 12, Ubuntu 24.04 and newer. Elsewhere: install the packages' equivalents and this script only checks for pkg-config.
set -eu
packages="gcc make pkg-config libc6-dev libmicrohttpd-dev libjansson-dev libuv1-dev libunistring-dev libsodium-dev libcmocka-dev curl"

missing=""
if command -v dpkg-query >/dev/null 2>&1; then
    for p in $packages; do
        case $(dpkg-query -W -f='${Status}' "$p" 2>/dev/null || true) in
            "install ok installed") ;;
            *) missing="$missing $p" ;;
        esac
    done
elif ! pkg-config --exists libmicrohttpd jansson libuv libsodium 2>/dev/null; then
    echo "bedside needs: $packages (or your distribution's names for them)" >&2
    exit 1
fi
[ -n "$missing" ] || exit 0

sudo=""
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || { echo "bedside needs these packages; install them as root:$missing" >&2; exit 1; }
    sudo=sudo
fi
echo "bedside: installing$missing"
export DEBIAN_FRONTEND=noninteractive
# A fresh machine may have no package lists yet.
# shellcheck disable=SC2086
$sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
}
