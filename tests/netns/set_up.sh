# Sets up the machines of namespaces.py in the namespaces that it runs in, then waits until its
# standard input is closed. Arguments: the subnet's first three numbers, the Python environment, and
# the machines' names.
set -e
subnet=$1
environment=$2
shift 2

# `ip netns` keeps its names in /run, which is ours alone from here on.
mount -t tmpfs tmpfs /run
mkdir -p /run/machines/environment
# Open MPI cannot start daemons from a path with spaces.
mount --bind "$environment" /run/machines/environment
echo "127.0.0.1 localhost" >/run/machines/hosts

ip link set lo up
ip link add name switch type bridge
ip link set switch up
number=0
for name in "$@"; do
    number=$((number + 1))
    ip netns add "$name"
    ip link add "port$number" type veth peer name eth0 netns "$name"
    ip link set "port$number" master switch up
    ip -n "$name" address add "$subnet$number/24" dev eth0
    ip -n "$name" link set lo up
    ip -n "$name" link set eth0 up
    echo "$subnet$number $name" >>/run/machines/hosts
done
mount --bind /run/machines/hosts /etc/hosts

# What mpirun calls in place of ssh: enter MACHINE TEXT... runs the text with the machine's shell. The
# temporary files of a killed job go with the memory of the machine.
cat >/run/machines/enter <<'ENTER'
#!/bin/sh
name=$1
shift
exec ip netns exec "$name" unshare --uts sh -c '
    hostname "$0" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && export TMPDIR=/dev/shm &&
    eval "$1"' "$name" "$*"
ENTER
chmod 755 /run/machines/enter

echo ready
exec cat
