#!/bin/bash
# One node of a cluster: the first process in namespaces of its own. Usage: slurm_node.sh FOLDER NAME ADDRESS
# All mounts and processes end with it.
set -eu
folder=$1 name=$2 address=$3
hostname "$name"
until ip link show eth0 > /dev/null 2>&1; do sleep 0.1; done
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up

mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/etc" /etc/slurm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir /run/munge /run/tmp

munged --key-file="$folder/munge.key" --seed-file=/run/munge/seed --log-file="$folder/$name.munged.log"
[ "$name" != n1 ] || slurmctld
slurmd -N "$name"
while :; do sleep 60 & wait; done # it also waits for processes that others leave behind
