#!/usr/bin/env bash
# A Slurm cluster on one machine, for tests/campaigns/slurm.py: a login node that runs slurmctld, and
# compute nodes, each a process tree with its own network, host name, process numbers, /tmp and
# /dev/shm. They share CLUSTER (default /srv/meshwright-slurm). As root on Debian 12.
#
#   slurm_cluster.sh start [N]       N compute nodes (default 3) of two CPUs each
#   slurm_cluster.sh as WORDS        run WORDS as the user `slurmuser` on the login node
#   slurm_cluster.sh on NODE WORDS   run WORDS as root on a node
#   slurm_cluster.sh cut N           a power cut: node N loses its processes and its network
#   slurm_cluster.sh mend N          node N comes back
#   slurm_cluster.sh stop            end everything
set -euo pipefail
export PATH=/usr/sbin:/sbin:$PATH
CLUSTER=${CLUSTER:-/srv/meshwright-slurm}
state=$CLUSTER/state
account=slurmuser
# Python may be root's own, as pyenv's is: its folder is shown to all users
interpreter=${PYENV_ROOT:-$(dirname "$(dirname "$(readlink -f "$(command -v python3)")")")}

install_slurm() {
    [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ] && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge iproute2 >/dev/null
}

configure() { # NODES
    mkdir -p "$state" /etc/slurm
    install -d -o slurm -g slurm "$state/controller"
    id $account &>/dev/null || useradd --home-dir "$CLUSTER/home" --shell /bin/bash $account
    install -d -o $account "$CLUSTER/home"
    { echo "127.0.0.1 localhost"; echo "10.88.0.1 login"
      for n in $(seq "$1"); do echo "10.88.0.1$n node$n"; done; } >"$state/hosts"
    cat >/etc/slurm/slurm.conf <<CONF
ClusterName=meshwright
SlurmctldHost=login(10.88.0.1)
AuthType=auth/munge
AuthInfo=cred_expire=15
CredType=cred/munge
MpiDefault=none
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/spool.%n
SlurmctldPidFile=$state/controller/pid
SlurmdPidFile=$state/slurmd.%n.pid
SlurmctldLogFile=$state/controller/log
SlurmdLogFile=$state/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=40
KillWait=30
MinJobAge=86400
GresTypes=gpu
NodeName=node[1-$1] CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >/etc/slurm/cgroup.conf
    for n in $(seq "$1"); do mkdir -p "$state/spool.node$n"; done
}

connect() { # NODES: a bridge on the login node, and a cable to each compute node
    if ! [ -e /run/netns/mw_login ]; then
        ip netns add mw_login
        ip -n mw_login link set lo up
        ip -n mw_login link add bridge type bridge
        ip -n mw_login addr add 10.88.0.1/24 dev bridge
        ip -n mw_login link set bridge up
    fi
    for n in $(seq "$1"); do
        [ -e "/run/netns/mw_node$n" ] && continue
        ip netns add "mw_node$n"
        ip -n "mw_node$n" link add eth0 type veth peer name "node$n" netns mw_login
        ip -n mw_login link set "node$n" master bridge up
        ip -n "mw_node$n" addr add "10.88.0.1$n/24" dev eth0
        ip -n "mw_node$n" link set lo up
        ip -n "mw_node$n" link set eth0 up
    done
}

runs() { [ -s "$state/$1.pid" ] && kill -0 "$(cat "$state/$1.pid")" 2>/dev/null; }

boot() { # NODE WORDS: its first process mounts what is its own, then runs the daemon and reaps orphans
    local node=$1
    shift
    runs "$node" && return
    env -i PATH="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" LANG=C.UTF-8 setsid \
        nsenter --net="/run/netns/mw_$node" unshare --uts --mount --pid --fork --mount-proc \
        bash -c '
            node=$1 cluster=$2 interpreter=$3
            shift 3
            hostname "$node"
            mount --make-rprivate /
            mount --bind "$cluster/state/hosts" /etc/hosts
            mount -t tmpfs shm /dev/shm
            mkdir -p /run/kept
            mount -t tmpfs kept /run/kept
            mkdir /run/kept/interpreter
            mount --bind "$interpreter" /run/kept/interpreter
            case $cluster in /tmp/*) mkdir /run/kept/cluster; mount --bind "$cluster" /run/kept/cluster ;; esac
            mount -t tmpfs -o mode=1777 tmp /tmp
            if [ -d /run/kept/cluster ]; then mkdir -p "$cluster"; mount --bind /run/kept/cluster "$cluster"; fi
            case $interpreter in /root/*)
                mount -t tmpfs -o mode=755 root /root
                mkdir -p "$interpreter"
                mount --bind /run/kept/interpreter "$interpreter" ;;
            esac
            "$@" &
            while wait -n; do :; done' _ "$node" "$CLUSTER" "$interpreter" "$@" \
        >>"$state/$node.out" 2>&1 </dev/null &
    sleep 1
    pgrep -P $! >"$state/$node.pid"
}

inside() { # NODE WORDS
    local pid
    pid=$(cat "$state/$1.pid")
    shift
    nsenter -t "$pid" -n -u -m -p "$@"
}

start() { # NODES
    install_slurm
    configure "$1"
    connect "$1"
    install -d -o munge -g munge /run/munge
    [ -f /etc/munge/munge.key ] || mungekey -c
    if ! pgrep -u munge -x munged >/dev/null; then
        setpriv --reuid munge --regid munge --clear-groups munged --force
        until [ -e /run/munge/munge.socket.2 ]; do sleep 0.1; done
    fi
    boot login slurmctld -D
    for n in $(seq "$1"); do boot "node$n" slurmd -D -N "node$n"; done
    for _ in $(seq 60); do
        [ "$(inside login sinfo -h -N -t idle | wc -l)" -eq "$1" ] && return
        sleep 1
    done
    inside login sinfo
    return 1
}

stop() {
    for file in "$state"/*.pid; do
        [ -s "$file" ] && kill -KILL "$(cat "$file")" 2>/dev/null || true # and all processes of the node
        rm -f "$file"
    done
    while pkill -u munge -x munged; do sleep 0.2; done
    sleep 1
    for file in /run/netns/mw_*; do [ -e "$file" ] && ip netns del "$(basename "$file")"; done
    rm -rf "$state"
}

case $1 in
start) start "${2:-3}" ;;
as)
    shift
    inside login setpriv --reuid $account --regid $account --clear-groups \
        env -i HOME="$CLUSTER/home" USER=$account LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin "$@"
    ;;
on)
    shift
    inside "$@"
    ;;
cut)
    kill -KILL "$(cat "$state/node$2.pid")"
    rm "$state/node$2.pid"
    ip -n mw_login link set "node$2" down
    ;;
mend)
    ip -n mw_login link set "node$2" up
    boot "node$2" slurmd -D -N "node$2"
    ;;
stop) stop ;;
*)
    sed -n '2,14p' "$0"
    exit 2
    ;;
esac
