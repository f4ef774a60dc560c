#!/bin/sh
# two_hosts.sh PROGRAM ARGUMENTS: mpirun with one process on each of two hosts, as far as anything in them can tell.
# They are namespaces with host names, network cards and addresses of their own, joined by a virtual cable; mpirun
# enters the other one as it would by ssh. Exit code 77: this machine does not allow it (or lacks unshare, ip, nsenter).
set -e
if [ "$1" != --inside ]; then
  unshare --map-root-user --net --uts ip link add wire0 type veth peer name wire1 2> /dev/null || exit 77
  exec unshare --map-root-user --net --uts "$0" --inside "$@"
fi
shift

unshare --net --uts sleep 100 &
other=$!
export TMPDIR=$(mktemp -d)
trap 'kill $other; rm -rf "$TMPDIR"' EXIT
agent=$TMPDIR/enter
until [ "$(readlink /proc/$other/ns/uts)" != "$(readlink /proc/$$/ns/uts)" ]; do sleep 0.01; done
enter="nsenter --target $other --net --uts"
printf '#!/bin/sh\nshift  # the host\nexec %s sh -c "$*"\n' "$enter" > "$agent"
chmod +x "$agent"

hostname host-a
$enter hostname host-b
ip link add wire0 type veth peer name wire1 netns $other
ip address add 10.77.0.1/24 dev wire0
$enter ip address add 10.77.0.2/24 dev wire1
for card in lo wire0; do ip link set $card up; done
for card in lo wire1; do $enter ip link set $card up; done

mpirun --allow-run-as-root --bind-to none --host 10.77.0.1,10.77.0.2 -np 2 --mca plm_rsh_agent "$agent" \
  --mca btl tcp,self --mca mpi_yield_when_idle 1 "$@"
