#!/bin/sh
# Installs anyverbs below a prefix. Needs no root where the prefix is yours.
set -eu

usage="usage: install.sh [--prefix DIR]   (without it: ~/.local)"
prefix=${HOME:-}/.local
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) [ $# -ge 2 ] || { echo "$usage" >&2; exit 2; }; prefix=$2; shift ;;
        --prefix=*) prefix=${1#--prefix=} ;;
        -h | --help) echo "$usage"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
    shift
done
case $prefix in
    /*) ;;
    *) prefix=$(pwd)/$prefix ;;
esac

here=$(cd "$(dirname "$0")" && pwd)
# The libraries get a directory of their own: in PREFIX/lib they would stand before the system's libibverbs.
mkdir -p "$prefix/bin" "$prefix/lib" "$prefix/share"
rm -rf "$prefix/lib/anyverbs.new" "$prefix/lib/anyverbs.old"
cp -R -P "$here/lib" "$prefix/lib/anyverbs.new"
if [ -e "$prefix/lib/anyverbs" ]; then
    mv "$prefix/lib/anyverbs" "$prefix/lib/anyverbs.old"
fi
mv "$prefix/lib/anyverbs.new" "$prefix/lib/anyverbs"
rm -rf "$prefix/lib/anyverbs.old"
cp -R -P "$here/share/." "$prefix/share"
cp "$here/bin/anyverbs" "$prefix/bin/anyverbs.new"
mv "$prefix/bin/anyverbs.new" "$prefix/bin/anyverbs"
echo "installed $prefix/bin/anyverbs"
case :${PATH:-}: in
    *":$prefix/bin:"*) ;;
    *) echo "$prefix/bin is not in PATH" ;;
esac
