#!/bin/sh
# Serve one model on all machines of a hostfile, one process per GPU:
#
#     examples/mpirun.sh eth0 --model /models/Qwen3-235B-A22B --port 2000
#
# Every machine has Pagewick and the model in the same places, and can log in on the others by ssh without a password.
# The first argument is the network interface between the machines; HOSTFILE, NP and SSH_PORT may be set.
# Without InfiniBand, add: -x NCCL_IB_DISABLE=1
set -eu
interface=$1
shift
hostfile=${HOSTFILE:-$(dirname "$0")/hostfile}
# Rank 0 is on the first machine of the file; the others find it there.
first=$(awk 'NF && $1 !~ /^#/ { print $1; exit }' "$hostfile")
exec mpirun -np "${NP:-16}" -hostfile "$hostfile" -x RUST_LOG=info -x MASTER_ADDR="$first" \
    -bind-to none -map-by slot --mca plm_rsh_args "-p ${SSH_PORT:-22}" --mca btl_tcp_if_include "$interface" \
    python3 -m pagewick serve --tensor-parallel-size "${NP:-16}" "$@"
