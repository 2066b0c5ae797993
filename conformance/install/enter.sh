#!/bin/sh
# Runs one case in a clean root: enter.sh ROOT PACKAGES CASES CASE, in mount, PID and network namespaces of its own.
# What the case writes is gone afterwards.
set -eu

root=$1 packages=$2 cases=$3 name=$4
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay \
    -o "lowerdir=$root,upperdir=/mnt/upper,workdir=/mnt/work${OVERLAY_OPTIONS:-}" /mnt/root
mkdir /mnt/root/packages /mnt/root/cases /mnt/root/outside
mount --bind "$packages" /mnt/root/packages
mount --bind "$cases" /mnt/root/cases
mount -t proc proc /mnt/root/proc
# An overlay of a user namespace has no devices of its own.
for node in null zero full random urandom tty; do
    rm -f "/mnt/root/dev/$node"
    : > "/mnt/root/dev/$node"
    mount --bind "/dev/$node" "/mnt/root/dev/$node"
done
ip link set lo up
cd /mnt/root
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
unset TMPDIR XDG_RUNTIME_DIR XDG_CACHE_HOME LD_PRELOAD LD_LIBRARY_PATH OVERLAY_OPTIONS
# A container engine changes the root in its turn, which it cannot below chroot(2).
pivot_root . outside
cd /
umount -l /outside
rmdir /outside
exec sh "/cases/$name.sh"
