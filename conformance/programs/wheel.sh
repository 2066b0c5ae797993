#!/bin/sh
# Two processes of a released wheel on one host with an Ethernet interface.
#
#   wheel.sh ANYVERBS PACKAGE==VERSION... -- PROGRAM.py ROLE ROLE
#
# Makes a virtual environment below $TMPDIR, installs the packages there, and runs PROGRAM.py once for each role. UCX_TLS
# and other variables go through. PYTHON names the interpreter. Root, and the network for the packages, are needed.
# docs/programs.md has the results of these:
#
#   wheel.sh target/dist/bin/anyverbs mooncake-transfer-engine-non-cuda==0.3.13.post1 \
#     -- conformance/programs/mooncake_engine.py server client
#   (with ANYVERBS_PERSONA=mlx5 ANYVERBS_DEVICE=anyverbs0 GLOG_v=2 its log says which GID it takes)
#   UCX_TLS=rc,ud,self wheel.sh target/dist/bin/anyverbs nixl-cu12==1.5.1 \
#     -- conformance/programs/nixl_agents.py target initiator
#   wheel.sh target/dist/bin/anyverbs --no-deps infinistore==0.2.35 uvloop==0.21.0 numpy fastapi==0.116.1 \
#     starlette==0.47.3 pydantic==2.11.9 pydantic-core==2.33.2 annotated-types typing-extensions typing-inspection \
#     anyio idna sniffio uvicorn click h11 -- conformance/programs/infinistore_cache.py server client
#   (without versions, packages that are newer than InfiniStore want others that its server does not use)
set -eu
anyverbs=$1
shift
packages=
while [ "$1" != -- ]; do
	packages="$packages $1"
	shift
done
program=$2 first=$3 second=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
# shellcheck disable=SC2086 # a list
"$work/venv/bin/pip" install --quiet --disable-pip-version-check $packages
export anyverbs program first second work
# A network of its own: nothing reaches the machine's.
unshare -n sh -eu -c '
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 192.0.2.1/24 dev eth0
ip link set eth1 up
ip link set eth0 up
python=$work/venv/bin/python
timeout 120 "$anyverbs" run -- "$python" "$program" "$first" "$work" >"$work/first" 2>&1 &
pid=$!
status=0
timeout 120 "$anyverbs" run -- "$python" "$program" "$second" "$work" >"$work/second" 2>&1 || status=$?
wait $pid || status=$?
if [ $status = 0 ]; then tail -n 5 "$work/first" "$work/second"; else cat "$work/first" "$work/second"; fi
exit $status
'
