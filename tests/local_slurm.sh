#!/usr/bin/env bash
# A real Slurm of one node on this machine, for the tests: munge, slurmctld and slurmd from Debian's packages.
#   tests/local_slurm.sh start DIR    then: export SLURM_CONF=DIR/slurm.conf
#   tests/local_slurm.sh stop DIR
# Needs root. `apt-get install slurm-wlm munge` brings the programs.
set -euo pipefail
action=$1
state=$2
node=$(hostname)

if [ "$action" = stop ]; then
  for daemon in slurmd slurmctld; do
    if [ -f "$state/$daemon.pid" ]; then kill "$(cat "$state/$daemon.pid")" 2>/dev/null || true; fi
  done
  exit 0
fi

mkdir -p "$state/ctld" "$state/d" /run/munge
chown munge: /run/munge
if ! munge -n </dev/null >/dev/null 2>&1; then runuser -u munge -- /usr/sbin/munged --force; fi
if ! getent hosts "$node" >/dev/null; then echo "127.0.0.1 $node" >>/etc/hosts; fi

cat >"$state/slurm.conf" <<CONF
ClusterName=mooss
SlurmctldHost=$node(127.0.0.1)
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=6000
PartitionName=test Nodes=$node Default=YES State=UP
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
CONF
export SLURM_CONF=$state/slurm.conf
slurmctld
slurmd
for _ in $(seq 60); do
  if [ "$(sinfo --noheader --format=%T)" = idle ]; then exit 0; fi
  sleep 0.5
done
echo "the cluster did not come up; see $state/*.log" >&2
exit 1
