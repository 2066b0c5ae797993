#!/bin/sh
# Installs anyverbs below a prefix, or removes it. Needs no root where the prefix is yours.
set -eu

usage="usage: install.sh [--uninstall] [--prefix DIR]   (without a prefix: ~/.local)"
fail() {
    echo "install.sh: $1" >&2
    exit 1
}

prefix=${HOME:+$HOME/.local} uninstall=
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) [ $# -ge 2 ] || { echo "$usage" >&2; exit 2; }; prefix=$2; shift ;;
        --prefix=*) prefix=${1#--prefix=} ;;
        --uninstall) uninstall=yes ;;
        -h | --help) echo "$usage"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
    shift
done
case $prefix in
    "") fail "no directory to install into: name one with --prefix DIR" ;;
    /*) ;;
    *) prefix=$(pwd)/$prefix ;;
esac

here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
lib=$prefix/lib/anyverbs bin=$prefix/bin/anyverbs
# Beside the libraries: the directories that an installation made, which go with it if nothing else is in them.
record=.directories-made
# The directory and those above it that do not exist.
missing() {
    dir=$1
    while [ ! -d "$dir" ]; do
        echo "$dir"
        dir=$(dirname "$dir")
    done
}
# Those of a list that are empty, the innermost first.
remove_empty() {
    echo "$1" | LC_ALL=C sort -r -u | while read -r dir; do
        [ -z "$dir" ] || rmdir "$dir" 2> /dev/null || :
    done
}
if [ -n "$uninstall" ]; then
    [ -e "$lib" ] || [ -e "$bin" ] || fail "anyverbs is not installed in $prefix"
    made=$(cat "$lib/$record" 2> /dev/null || :)
    rm -rf "$lib" "$bin"
    (cd "$here/share" && find . -type f) | while read -r file; do
        rm -f "$prefix/share/$file"
    done
    remove_empty "$made"
    echo "removed anyverbs from $prefix"
    exit 0
fi

# The loader separates names of directories by these, and has no escape.
case $prefix in
    *" "* | *:* | *\;*) fail "no program can load libraries from $prefix: its name has a space, a colon or a semicolon" ;;
esac
# What root installs is for all users.
[ "$(id -u)" != 0 ] || umask 022
fresh=$(
    missing "$prefix/bin"
    missing "$prefix/lib"
    (cd "$here/share" && find . -type d) | while read -r dir; do
        missing "$prefix/share${dir#.}"
    done
)
finished=
trap 'rm -rf "$lib.new" "$bin.new"; [ -n "$finished" ] || remove_empty "$fresh"' EXIT
# The libraries get a directory of their own: in PREFIX/lib they would stand before the system's libibverbs.
mkdir -p "$prefix/bin" "$prefix/lib" "$prefix/share"
rm -rf "$lib.new" "$lib.old"
# All that can fail for want of room comes before the older libraries and command are replaced.
cp -R -P "$here/lib" "$lib.new"
cp "$here/bin/anyverbs" "$bin.new"
cp -R -P "$here/share/." "$prefix/share"
{
    cat "$lib/$record" 2> /dev/null || :
    echo "$fresh"
} > "$lib.new/$record"
if [ -e "$lib" ]; then
    mv "$lib" "$lib.old"
fi
mv "$lib.new" "$lib"
mv "$bin.new" "$bin"
rm -rf "$lib.old"
finished=yes
echo "installed $bin"
case :${PATH:-}: in
    *":$prefix/bin:"*) ;;
    *) echo "$prefix/bin is not in PATH" ;;
esac
