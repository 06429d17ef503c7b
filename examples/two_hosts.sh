#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces, connected by a virtual cable, each run two_hosts.py. Needs root and
# iproute2.
#   sudo bash examples/two_hosts.sh --epochs 3
set -euo pipefail
cd "$(dirname "$0")/.."
a=trainloop-a-$$ b=trainloop-b-$$
cable=tl$$
clean() {
  ip netns del "$a" 2>/dev/null || true # also deletes its end of the cable, and therefore the other end
  ip netns del "$b" 2>/dev/null || true
}
trap clean EXIT
ip netns add "$a"
ip netns add "$b"
ip link add "${cable}a" netns "$a" type veth peer name "${cable}b" netns "$b"
up() { # namespace, its end of the cable, its address
  ip -n "$1" addr add "$3/24" dev "$2"
  ip -n "$1" link set lo up
  ip -n "$1" link set "$2" up
}
up "$a" "${cable}a" 10.77.0.1
up "$b" "${cable}b" 10.77.0.2

export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
python=${PYTHON:-python}
GLOO_SOCKET_IFNAME=${cable}b ip netns exec "$b" "$python" examples/two_hosts.py --node-rank 1 "$@" &
other=$!
GLOO_SOCKET_IFNAME=${cable}a ip netns exec "$a" "$python" examples/two_hosts.py --node-rank 0 "$@"
wait "$other"
