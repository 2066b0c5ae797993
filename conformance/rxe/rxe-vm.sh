#!/bin/bash
# rxe-vm.sh - boot the Linux kernel's Soft-RoCE (rdma_rxe) and SoftiWARP (siw)
# in a small QEMU guest, as an independent peer for a userspace RoCEv2 stack.
#
#   rxe-vm.sh deps             apt-get what the host needs (root)
#   rxe-vm.sh build            kernel + root file system + initramfs -> $RXE_WORK
#   rxe-vm.sh fresh            whether that was built, and as this script and these settings build it (status)
#   rxe-vm.sh uml              also build a User Mode Linux kernel (rxe, siw built in) for RXE_ACCEL=uml
#   rxe-vm.sh start N          boot guest N (1..9) at $RXE_NET.(N+1), host is $RXE_NET.1; IPv6 likewise
#   rxe-vm.sh run N 'COMMAND'  run a shell command in guest N; its output, its exit status
#   rxe-vm.sh spawn N 'COMMAND'   same, in the background; prints a job name
#   rxe-vm.sh wait N JOB [SEC] wait for a spawned job; its output, its exit status
#   rxe-vm.sh kill N JOB       end a spawned job (the whole session it leads)
#   rxe-vm.sh stop N | stop all   power the guest off; "all" takes the bridge down too
#   rxe-vm.sh status
#
# $RXE_WORK/vmN/share on the host is /mnt in guest N (files go both ways).
#
# Settings (environment):
#   RXE_WORK   work directory              (default target/rxe of this source tree)
#   RXE_FLAVOR linux-image-FLAVOR package  (default 6.12-amd64; "amd64" gives 6.1)
#   RXE_SUITE  Debian suite of the guest   (default bookworm)
#   RXE_NET    first three octets          (default 10.99.0)
#   RXE_NET6   the same in IPv6            (default fd99:, which gives fd99::1); link-local the host is fe80::1
#   RXE_BR     bridge name; taps are ${RXE_BR}N   (default rxebr)
#   RXE_NETNS  network namespace that holds bridge and taps (default rxe-peer; empty: the current one)
#   RXE_MTU    MTU of bridge, taps, eth0   (default 1500 -> RoCE path MTU 1024)
#   RXE_LINKS  rxe | siw | rxe,siw: RDMA links made at boot (default rxe). With both,
#              rdma_cm serves an address from the first one only.
#   RXE_ACCEL  kvm | tcg | uml             (default: kvm or tcg, whichever boots, found by build)
#   RXE_SMP, RXE_MEM   vCPUs, MiB per guest (default 2, 1024)
set -euo pipefail

RXE_WORK=${RXE_WORK:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/target/rxe}
RXE_FLAVOR=${RXE_FLAVOR:-6.12-amd64}
RXE_SUITE=${RXE_SUITE:-bookworm}
RXE_NET=${RXE_NET:-10.99.0}
RXE_NET6=${RXE_NET6:-fd99:}
RXE_BR=${RXE_BR:-rxebr}
RXE_NETNS=${RXE_NETNS-rxe-peer}
RXE_MTU=${RXE_MTU:-1500}
RXE_LINKS=${RXE_LINKS:-rxe}
RXE_SMP=${RXE_SMP:-2}
RXE_MEM=${RXE_MEM:-1024}
RXE_ACCEL=${RXE_ACCEL:-}

GUEST_PKGS=kmod,iproute2,iputils-ping,procps,ethtool,ibverbs-utils,ibverbs-providers
GUEST_PKGS+=,rdmacm-utils,rdma-core,infiniband-diags,perftest,python3-pyverbs
GUEST_PKGS+=,qperf,iperf3,tcpdump,strace,busybox-static,socat

die() { echo "rxe-vm: $*" >&2; exit 1; }
say() { printf '[%4ds] %s\n' "$SECONDS" "$*" >&2; }
inns() { if [ -n "$RXE_NETNS" ]; then ip netns exec "$RXE_NETNS" "$@"; else "$@"; fi; }
# In place of the shell that calls it, and in a session of its own: the process id is the guest's, and Ctrl-C is not for it.
exec_inns() { if [ -n "$RXE_NETNS" ]; then exec setsid ip netns exec "$RXE_NETNS" "$@"; else exec setsid "$@"; fi; }
vmdir() { [[ ${1:-} =~ ^[1-9]$ ]] || die "guest number must be 1..9"; D=$RXE_WORK/vm$1; }
# A process id may have gone to somebody else since: the guest's command line names its directory.
alive() { [ -s "$D/pid" ] && grep -qsF "$D/" "/proc/$(cat "$D/pid")/cmdline"; }

cmd_deps() {
	apt-get install -y --no-install-recommends qemu-system-x86 mmdebstrap e2fsprogs \
		cpio xz-utils kmod iproute2 busybox-static make gcc flex bison bc
}

# ---------------------------------------------------------------- image build
# What the image is made by and from: another text makes another image. The guest's process 1 has a mark of its own, since
# that alone is soon replaced.
made_from() {
	{ declare -f kernel_package cmd_build build_siw build_initrd probe_accel; echo "$GUEST_PKGS $RXE_FLAVOR $RXE_SUITE"; } | sha256sum
}
init_made_from() { declare -f write_guest_init cmd_image | sha256sum; }
marked() { [ -s "$RXE_WORK/$1" ] && [ "$(cat "$RXE_WORK/$1")" = "$2" ]; }
cmd_fresh() { marked made-from "$(made_from)"; }

# Nothing where there is none; that is no failure.
kernel_package() {
	{ apt-cache depends "linux-image-$RXE_FLAVOR" 2>/dev/null || true; } | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1
}

cmd_build() {
	mkdir -p "$RXE_WORK"; cd "$RXE_WORK"
	rm -f made-from
	mkdir -p deb
	local img ver base
	img=$(kernel_package)
	# The list of a fresh container may be too old to know the kernel, or its version.
	if [ -z "$img" ]; then apt-get update -qq; img=$(kernel_package); fi
	[ -n "$img" ] || die "no package linux-image-$RXE_FLAVOR"
	ver=${img#linux-image-}
	say "kernel $ver: download"
	local want=("$img" "linux-headers-$ver")
	base=$(apt-cache depends "linux-headers-$ver" | sed -n 's/^ *Depends: \(linux-\(headers\|kbuild\)-.*\)/\1/p')
	want+=($base)
	base=$(echo "$ver" | sed 's/^\([0-9]*\.[0-9]*\).*/\1/')
	want+=("linux-source-$base")
	(cd deb; apt-get download -qq "${want[@]}" 2>&1 | grep -v unsandboxed || true)

	say "root file system: mmdebstrap $RXE_SUITE"
	rm -rf root; mmdebstrap --quiet --mode=root --variant=minbase \
		--aptopt='APT::Install-Recommends "false"' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' \
		--include="$GUEST_PKGS" "$RXE_SUITE" root

	say "kernel: unpack, choose modules"
	rm -rf kern; mkdir kern; dpkg -x "$(ls deb/"$img"_*.deb | tail -1)" kern
	cp kern/boot/vmlinuz-"$ver" vmlinuz
	local s=kern/lib/modules/$ver t=root/usr/lib/modules/$ver p
	mkdir -p "$t/kernel"; cp "$s"/modules.{order,builtin,builtin.modinfo} "$t/"
	for p in crypto lib net fs/9p fs/configfs fs/netfs fs/fscache fs/ext4 fs/jbd2 fs/mbcache.ko fs/mbcache.ko.xz \
		arch/x86/crypto arch/x86/lib drivers/infiniband drivers/block/virtio_blk.ko* \
		drivers/char/hw_random drivers/virtio drivers/net/virtio_net.ko* drivers/net/net_failover.ko* \
		drivers/net/veth.ko* drivers/net/dummy.ko* drivers/net/macvlan.ko* net/core; do
		for p in $s/kernel/$p; do
			[ -e "$p" ] || continue
			mkdir -p "$t/kernel/$(dirname "${p#$s/kernel/}")"
			cp -a "$p" "$t/kernel/$(dirname "${p#$s/kernel/}")/"
		done
	done
	build_siw "$ver" "$base" "$t" || say "siw.ko: not built (see $RXE_WORK/siw.log); rxe only"
	depmod -b root/usr "$ver" 2>/dev/null || depmod -b root "$ver"
	echo "$ver" > version

	say "initramfs, ext4 image"
	build_initrd "$ver"
	cmd_image
	rm -rf kern hdr
	say "accelerator check"
	probe_accel > accel
	made_from > made-from
	say "done: accelerator $(cat accel), $(du -sh --apparent-size root | cut -f1) root file system"
}

cmd_image() {
	cd "$RXE_WORK"
	write_guest_init > root/sbin/rxe-init; chmod 755 root/sbin/rxe-init
	rm -f root.img; truncate -s 1G root.img
	mke2fs -q -t ext4 -O ^has_journal -d root -F root.img
	init_made_from > init-made-from
}

# Debian does not switch SoftiWARP on, so build that one module from Debian's
# own kernel source against Debian's own headers; nothing is installed.
build_siw() {
	local ver=$1 base=$2 t=$3 common
	if ls "$t"/kernel/drivers/infiniband/sw/siw/siw.ko* >/dev/null 2>&1; then return 0; fi
	say "siw.ko: build out of tree"
	rm -rf hdr; mkdir hdr
	for p in deb/linux-headers-"$ver"_*.deb deb/linux-headers-*-common_*.deb deb/linux-kbuild-*.deb; do
		dpkg -x "$p" hdr
	done
	common=$(sed -n 's,^include /usr/src/\(.*\)/Makefile,\1,p' hdr/usr/src/linux-headers-"$ver"/Makefile)
	[ -n "$common" ] || common=$(basename hdr/usr/src/*-common)
	echo "include $PWD/hdr/usr/src/$common/Makefile" > hdr/usr/src/linux-headers-"$ver"/Makefile
	rm -f hdr/usr/src/linux-headers-"$ver"/vmlinux   # else: BTF, which needs pahole
	rm -rf siw; mkdir siw
	dpkg --fsys-tarfile "$(ls deb/linux-source-"$base"_*.deb | tail -1)" \
		| tar -xO "./usr/src/linux-source-$base.tar.xz" | xz -dcT0 \
		| tar -x -C siw --strip-components=5 "linux-source-$base/drivers/infiniband/sw/siw" || return 1
	local vars=hdr/usr/src/linux-headers-"$ver"/.kernelvariables cc
	cc=$(sed -n 's/.*\(gcc-[0-9]*\).*/\1/p' "$vars" 2>/dev/null | head -1)
	command -v "${cc:-gcc}" >/dev/null || cc=gcc
	make -C "hdr/usr/src/linux-headers-$ver" M="$PWD/siw" CC="${cc:-gcc}" CONFIG_RDMA_SIW=m \
		-j"$(nproc)" modules > siw.log 2>&1 || return 1
	mkdir -p "$t/kernel/drivers/infiniband/sw/siw"
	strip --strip-debug siw/siw.ko
	cp siw/siw.ko "$t/kernel/drivers/infiniband/sw/siw/"
}

# The same drivers in a User Mode Linux kernel: a plain process, no emulation of
# the processor. One CPU, slow system calls, but the kernel data path at full speed.
cmd_uml() {
	cd "$RXE_WORK"
	local base src k
	base=$(sed 's/^\([0-9]*\.[0-9]*\).*/\1/' version); src=linux-source-$base
	say "uml: unpack $src"
	rm -rf uml; mkdir uml
	dpkg --fsys-tarfile "$(ls deb/"$src"_*.deb | tail -n 1)" | tar -xO "./usr/src/$src.tar.xz" \
		| xz -dcT0 | tar -x -C uml --strip-components=1 --exclude='*/drivers/gpu/*.[ch]' \
			--exclude='*/Documentation/*.rst' --exclude='*/drivers/net/ethernet/*.[ch]'
	say "uml: configure"
	make -s -C uml ARCH=um tinyconfig
	for k in 64BIT MULTIUSER SYSVIPC POSIX_TIMERS HIGH_RES_TIMERS NO_HZ_IDLE EPOLL SIGNALFD TIMERFD \
		EVENTFD SHMEM AIO ADVISE_SYSCALLS MEMBARRIER KALLSYMS BINFMT_ELF BINFMT_SCRIPT BLOCK BLK_DEV \
		BLK_DEV_UBD HOSTFS EXT4_FS TMPFS PROC_FS PROC_SYSCTL SYSFS DEVTMPFS DEVTMPFS_MOUNT TTY UNIX98_PTYS \
		STDERR_CONSOLE NULL_CHAN UML_RANDOM HW_RANDOM NET PACKET UNIX INET IPV6 IP_MULTICAST \
		NAMESPACES NET_NS NETDEVICES NET_CORE DUMMY VETH NET_SCHED NET_SCH_NETEM UML_NET \
		UML_NET_VECTOR VIRTIO_MENU VIRTIO_UML UML_PCI_OVER_VIRTIO PCI INFINIBAND \
		INFINIBAND_USER_MAD INFINIBAND_USER_ACCESS INFINIBAND_ADDR_TRANS RDMA_RXE RDMA_SIW \
		CRYPTO CRYPTO_CRC32 CRYPTO_CRC32C CC_OPTIMIZE_FOR_PERFORMANCE PRINTK FUTEX \
		INOTIFY_USER FILE_LOCKING DEBUG_INFO_NONE; do echo "CONFIG_$k=y"; done >> uml/.config
	{
		echo '# CONFIG_CC_OPTIMIZE_FOR_SIZE is not set'
		echo 'CONFIG_UML_PCI_OVER_VIRTIO_DEVICE_ID=1234'
		echo 'CONFIG_LOCALVERSION="-uml-rxe"'
		echo 'CONFIG_CON_ZERO_CHAN="null,fd:1"'; echo 'CONFIG_CON_CHAN="null"'
	} >> uml/.config
	make -s -C uml ARCH=um olddefconfig 2> uml.log
	grep -q '^CONFIG_RDMA_RXE=y' uml/.config || die "uml: RDMA_RXE not in the configuration"
	say "uml: compile"
	make -s -C uml ARCH=um -j"$(nproc)" linux >> uml.log 2>&1 || die "uml: see $RXE_WORK/uml.log"
	strip -o linux-uml uml/linux; rm -rf uml
	say "uml: done"
}

# A first-stage initramfs: static busybox, the disk and file system modules.
build_initrd() {
	local ver=$1 d m n=0
	d=$(mktemp -d)
	mkdir -p "$d"/{bin,mod,proc,sys,dev,new}
	cp root/bin/busybox "$d/bin/busybox"
	{
		echo '#!/bin/busybox sh'
		echo 'b=/bin/busybox; $b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev'
		for m in $(for q in virtio_pci virtio_blk crc32c_generic ext4; do
				modprobe -d "$PWD/root/usr" -S "$ver" --show-depends "$q" 2>/dev/null \
				|| modprobe -d "$PWD/root" -S "$ver" --show-depends "$q" 2>/dev/null || true
			done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!s[$0]++'); do
			n=$((n + 1))
			case $m in
			*.xz) xz -dc "$m" > "$d/mod/$n.ko" ;;
			*) cp "$m" "$d/mod/$n.ko" ;;
			esac
			echo "\$b insmod /mod/$n.ko"
		done
		echo 'i=0; while [ ! -b /dev/vda ] && [ $i -lt 100 ]; do $b sleep 0.1; i=$((i+1)); done'
		echo '$b mount -t ext4 -o rw,noatime /dev/vda /new || { echo RXE-VM-NO-ROOT; $b poweroff -f; }'
		echo '$b mount --move /dev /new/dev; $b umount /proc; $b umount /sys'
		echo 'exec $b switch_root /new /sbin/rxe-init'
	} > "$d/init"
	chmod 755 "$d/init"
	(cd "$d"; find . | cpio -o -H newc --quiet | gzip -1) > initrd
	rm -rf "$d"
}

# The guest's process 1: set the network and the RDMA links up, then serve jobs.
write_guest_init() {
	cat <<'INIT'
#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C
mount -t proc proc /proc; grep -q " /dev devtmpfs" /proc/mounts || mount -t devtmpfs dev /dev; mount -t sysfs sys /sys; mount -t tmpfs tmp /tmp; mount -t tmpfs run /run
mkdir -p /dev/pts /dev/shm; mount -t devpts pts /dev/pts; mount -t tmpfs shm /dev/shm
read -r args < /proc/cmdline
ip= ip6= mtu= links=rxe
for a in $args; do case $a in
	rxe.ip=*) ip=${a#*=};; rxe.ip6=*) ip6=${a#*=};; rxe.mtu=*) mtu=${a#*=};; rxe.links=*) links=${a#*=};; rxe.name=*) hostname "${a#*=}" 2>/dev/null || echo "${a#*=}" > /proc/sys/kernel/hostname;;
esac; done
if grep -q rxe.fs=9p <<< "$args"; then
	modprobe -a 9pnet_virtio 9p
	mount -t 9p -o trans=virtio,version=9p2000.L,msize=131072,cache=none share /mnt
	modprobe virtio_net
else
	mount -t hostfs share /mnt -o "$(sed 's/.*rxe.share=\([^ ]*\).*/\1/' /proc/cmdline)"
fi
ulimit -l unlimited
ip link set lo up
n=eth0; [ -e /sys/class/net/vec0 ] && n=vec0
# A known link-local address, and none that is under duplicate detection when the RDMA link reads them.
ip link set $n addrgenmode none
ip link set $n mtu "${mtu:-1500}" up; ip addr add "$ip" dev $n; ip route add default via "${ip%.*}.1" 2>/dev/null
for a in "$ip6" "fe80::${ip6##*:}"; do [ "$a" = fe80:: ] || [ -z "$a" ] || ip addr add "$a" dev $n nodad; done
modprobe -a rdma_rxe ib_uverbs rdma_ucm ib_umad siw 2>/dev/null
for l in ${links//,/ }; do rdma link add ${l}0 type $l netdev $n; done
echo 127.0.0.1 localhost > /etc/hosts
read -r up _ < /proc/uptime
echo "up $up" > /mnt/ready; echo "RXE-VM-READY $up"
ln -sf /proc/self/fd /dev/fd; mkfifo /run/idle; exec 9<>/run/idle
cd /root
while :; do
	for j in /mnt/jobs/*.cmd; do
		[ -f "$j" ] || continue
		b=${j%.cmd}; mv "$j" "$b.sh"
		case $b in */poweroff) sync; busybox poweroff -f;; esac
		setsid bash -c 'echo $$ > "$1.pid"; bash "$1.sh" > "$1.out" 2>&1 < /dev/null; echo $? > "$1.tmp"; mv "$1.tmp" "$1.rc"' _ "$b" &
	done
	for j in /mnt/jobs/*.kill; do
		[ -f "$j" ] || continue
		b=${j%.kill}
		# A job that was taken a moment ago has not said its number yet: in the next turn.
		p=$(cat "$b.pid" 2>/dev/null)
		if [ -e "$b.sh" -o -e "$b.cmd" ] && [ ! -e "$b.rc" ] && [ -z "$p" ]; then continue; fi
		rm -f "$j"
		if [ ! -e "$b.rc" ] && [ -n "$p" ]; then kill -TERM -- "-$p"; echo 143 > "$b.tmp"; mv "$b.tmp" "$b.rc"; fi
	done
	read -rt 0.15 -u 9 || :
done
INIT
}

# KVM that only runs paravirtual guests (or none) shows itself within seconds.
probe_accel() {
	local log=$RXE_WORK/probe.log pid i
	if [ -n "$RXE_ACCEL" ]; then echo "$RXE_ACCEL"; return; fi
	if [ ! -w /dev/kvm ]; then echo tcg; return; fi
	: > "$log"
	qemu-system-x86_64 -accel kvm -cpu host,-arch-capabilities -m 512 -nodefaults -display none \
		-no-reboot -serial file:"$log" -kernel "$RXE_WORK/vmlinuz" -initrd "$RXE_WORK/initrd" \
		-append 'console=ttyS0 panic=-1' > "$log.err" 2>&1 &
	pid=$!
	for i in $(seq 40); do
		sleep 0.25
		if grep -q RXE-VM-NO-ROOT "$log"; then kill $pid 2>/dev/null || :; echo kvm; return; fi
		if ! kill -0 $pid 2>/dev/null || grep -q 'KVM internal error' "$log.err"; then break; fi
	done
	kill $pid 2>/dev/null || :
	echo tcg
}

# ------------------------------------------------------------------- network
net_up() {
	if [ -n "$RXE_NETNS" ]; then ip netns add "$RXE_NETNS" 2>/dev/null || :; inns ip link set lo up; fi
	if ! inns ip link show "$RXE_BR" >/dev/null 2>&1; then
		inns ip link add "$RXE_BR" type bridge mcast_snooping 0
		inns ip link set "$RXE_BR" addrgenmode none
		inns ip addr add "$RXE_NET.1/24" dev "$RXE_BR"
		inns ip addr add "$RXE_NET6:1/64" dev "$RXE_BR" nodad
		inns ip addr add fe80::1/64 dev "$RXE_BR" nodad
	fi
	inns ip link set "$RXE_BR" up
	inns ip link show "$RXE_BR$1" >/dev/null 2>&1 || inns ip tuntap add "$RXE_BR$1" mode tap vnet_hdr
	inns ip link set "$RXE_BR$1" mtu "$RXE_MTU" master "$RXE_BR" up
	inns ip link set "$RXE_BR" mtu "$RXE_MTU"
}

# ------------------------------------------------------------------- running
cmd_start() {
	vmdir "${1:-}"; alive && die "guest $1 already runs"
	cmd_fresh || die "no image, or an outdated one: run build first"
	marked init-made-from "$(init_made_from)" || (cmd_image)
	local acc=${RXE_ACCEL:-$(cat "$RXE_WORK/accel")} cpu accel
	rm -rf "$D"; mkdir -p "$D/share/jobs"
	cat "$RXE_WORK/made-from" "$RXE_WORK/init-made-from" > "$D/made-from"
	net_up "$1"
	if [ "$acc" = uml ]; then
		TMPDIR=$D exec_inns "$RXE_WORK/linux-uml" mem="${RXE_MEM}M" umid="rxe$1-$$" \
			ubd0c="$D/cow,$RXE_WORK/root.img" root=/dev/ubda rootfstype=ext4 rw init=/sbin/rxe-init \
			con=null con0=null,fd:1 quiet rxe.fs=hostfs rxe.share="$D/share" \
			vec0:transport=tap,ifname="$RXE_BR$1",depth=128,gro=1,mac=52:54:00:99:00:0$(($1 + 1)),mtu="$RXE_MTU" \
			rxe.ip="$RXE_NET.$(($1 + 1))/24" rxe.ip6="$RXE_NET6:$(($1 + 1))/64" rxe.mtu="$RXE_MTU" rxe.links="$RXE_LINKS" rxe.name="rxe$1" \
			> "$D/console" 2>&1 < /dev/null &
		echo $! > "$D/pid"; disown
		wait_ready "$1" uml; local D=$D
		# perftest turns cycles into time with this line, which UML does not print
		cmd_run "$1" "cp /proc/cpuinfo /run/c; echo 'cpu MHz : $(sed -n 's/^cpu MHz.*: //p' /proc/cpuinfo | head -n 1)' >> /run/c; mount --bind /run/c /proc/cpuinfo"
		return
	fi
	# In TCG of this age carry-less multiply is slow: the kernel's table CRC wins.
	case $acc in
	kvm) accel=kvm cpu=host ;;
	*) accel=tcg,thread=multi,tb-size=256 cpu=${RXE_CPU:-max,-pclmulqdq,-la57} ;;
	esac
	exec_inns qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp "$RXE_SMP" -m "$RXE_MEM" \
		-nodefaults -display none -no-reboot -serial file:"$D/console" \
		-kernel "$RXE_WORK/vmlinuz" -initrd "$RXE_WORK/initrd" \
		-append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable net.ifnames=0 rxe.fs=9p rxe.ip=$RXE_NET.$(($1 + 1))/24 rxe.ip6=$RXE_NET6:$(($1 + 1))/64 rxe.mtu=$RXE_MTU rxe.links=$RXE_LINKS rxe.name=rxe$1" \
		-drive file="$RXE_WORK/root.img",format=raw,if=none,id=d0,snapshot=on,cache=unsafe,file.locking=off \
		-device virtio-blk-pci,drive=d0 \
		-netdev tap,id=n0,ifname="$RXE_BR$1",script=no,downscript=no,vhost=off \
		-device virtio-net-pci,netdev=n0,mac=52:54:00:99:00:0$(($1 + 1)),romfile= \
		-object rng-random,id=r0,filename=/dev/urandom -device virtio-rng-pci,rng=r0 \
		-fsdev local,id=f0,path="$D/share",security_model=none,multidevs=remap \
		-device virtio-9p-pci,fsdev=f0,mount_tag=share \
		> "$D/qemu.log" 2>&1 < /dev/null &
	echo $! > "$D/pid"; disown
	wait_ready "$1" "$acc"
}

wait_ready() {
	local i
	for i in $(seq 900); do
		sleep 0.2   # first: the process may not be the guest yet
		[ -e "$D/share/ready" ] && { say "guest $1 $(cat "$D/share/ready") at $RXE_NET.$(($1 + 1)) ($2)"; return 0; }
		alive || { tail -n 5 "$D/console" "$D/qemu.log" >&2 || :; die "guest $1 ended"; }
	done
	die "guest $1 not ready after 180 s (console: $D/console)"
}

cmd_spawn() {
	vmdir "${1:-}"; alive || die "guest $1 is not running"
	local j
	j=$(mktemp -u "j$(date +%s%N)XXXX")
	printf '%s\n' "$2" > "$D/share/jobs/$j.new"; mv "$D/share/jobs/$j.new" "$D/share/jobs/$j.cmd"
	echo "$j"
}

cmd_wait() {
	vmdir "${1:-}"
	local j=$D/share/jobs/$2 n=$((${3:-600} * 20)) rc
	while [ ! -e "$j.rc" ]; do
		alive || die "guest $1 ended"
		[ $((n--)) -gt 0 ] || { cat "$j.out" 2>/dev/null; die "job $2 still runs"; }
		sleep 0.05
	done
	cat "$j.out" 2>/dev/null || :
	rc=$(cat "$j.rc"); return "$rc"
}

cmd_run() { local j; j=$(cmd_spawn "$1" "$2"); cmd_wait "$1" "$j" "${3:-600}"; }

cmd_kill() { vmdir "${1:-}"; : > "$D/share/jobs/$2.kill"; }

cmd_stop() {
	local i n
	if [ "${1:-}" = all ]; then
		for n in 1 2 3 4 5 6 7 8 9; do vmdir $n; if alive; then cmd_stop $n; fi; done
		inns ip link del "$RXE_BR" 2>/dev/null || :
		if [ -n "$RXE_NETNS" ]; then ip netns del "$RXE_NETNS" 2>/dev/null || :; fi
		return
	fi
	vmdir "${1:-}"
	if alive; then
		: > "$D/share/jobs/poweroff.cmd"
		for i in $(seq 50); do alive || break; sleep 0.1; done
		alive && kill "$(cat "$D/pid")"
	fi
	rm -f "$D/pid"
	inns ip link del "$RXE_BR$1" 2>/dev/null || :
}

cmd_status() {
	local n
	echo "work $RXE_WORK, kernel $(cat "$RXE_WORK/version" 2>/dev/null || echo none), accel $(cat "$RXE_WORK/accel" 2>/dev/null)"
	for n in 1 2 3 4 5 6 7 8 9; do
		vmdir $n; alive || continue
		echo "guest $n pid $(cat "$D/pid") $RXE_NET.$((n + 1))$([ "$(cat "$D/made-from" 2>/dev/null)" = "$(made_from; init_made_from)" ] || echo ' outdated')"
	done
}

c=${1:-}; shift || :
case $c in
deps | build | fresh | image | uml | start | spawn | wait | run | kill | stop | status) "cmd_$c" "$@" ;;
*) sed -n '2,/^set -/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2 ;;
esac
