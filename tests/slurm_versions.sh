#!/usr/bin/env bash
# The core of the tests on Slurm, on the versions of later Debian suites, each in a root directory of its own below build/slurm; and a job
# whose steps run in Apptainer, in the last of them; and a run on 64 nodes on this machine's own version. Needs root and debootstrap. The checkout and its Python are the ones outside.
#
#     tests/slurm_versions.sh [suite ...]
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "error: needs root: every suite gets a root directory, and mounts" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "error: debootstrap is not installed (Debian: apt-get install debootstrap)" >&2; exit 2; }
mirror="${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
# What the tests use, and the libraries that the Python outside is linked with.
packages=slurm-wlm,munge,iproute2,procps,util-linux,bash,bubblewrap,ca-certificates,python3,libreadline8
base="$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')"
tests=(tests/functional/test_slurm_cluster.py tests/functional/test_slurm_runs.py::test_smoke tests/functional/test_slurm_sites.py)

suite() { # its root directory, made once
  root="$PWD/build/slurm/$1"
  if [ ! -e "$root/.made" ]; then
    rm -rf "$root" && mkdir -p "$root"
    debootstrap --variant=minbase --include="$packages$([ "$1" = unstable ] && echo ,apptainer || true)" "$1" "$root" "$mirror" >"$root.log" || {
      tail -5 "$root.log" >&2
      exit 1
    }
    if [ -e "$root/etc/apptainer/apptainer.conf" ]; then # where root has not every capability, as in many containers
      sed -i 's/^root default capabilities = full/root default capabilities = no/' "$root/etc/apptainer/apptainer.conf"
    fi
    touch "$root/.made"
  fi
  echo "$root"
}

within() { # ROOT COMMAND...: with the checkout, its Python, and this machine's processes and devices
  unshare --mount --propagation private bash -euc '
    root=$1 checkout=$2 base=$3; shift 3
    mount --bind "$root" "$root"
    for place in /proc /sys /dev "$checkout" "$base"; do mkdir -p "$root$place"; mount --rbind "$place" "$root$place"; done
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mkdir -p "$root/.outside"; cd "$root"; pivot_root . .outside; umount -l /.outside
    cd "$checkout"; exec env PATH=/usr/sbin:/usr/bin:/sbin:/bin OMP_NUM_THREADS=1 "$@"' within "$1" "$PWD" "$base" "${@:2}"
}

image() { # a container image: the root directory of the first suite, with the environment of the tests as its python3
  root="$PWD/build/slurm/image"
  if [ ! -e "$root/.made" ]; then
    rm -rf "$root" && cp -a "$(suite trixie)" "$root" && mkdir -p "$root$PWD" "$root$base"
    printf '#!/bin/sh\nexec "%s/.venv/bin/python" "$@"\n' "$PWD" >"$root/usr/local/bin/python3"
    chmod +x "$root/usr/local/bin/python3"
  fi
  echo "$root"
}

[ $# -gt 0 ] || set -- trixie unstable
for one in "$@"; do
  root="$(suite "$one")"
  echo "== $one: $(within "$root" slurmctld -V)"
  within "$root" .venv/bin/python -m pytest -q -p no:cacheprovider "${tests[@]}"
  if [ -e "$root/usr/bin/apptainer" ]; then
    echo "== $one: $(within "$root" apptainer --version)"
    within "$root" env ALIGNER_TEST_IMAGE="$(image)" .venv/bin/python -m pytest -q -p no:cacheprovider tests/functional/test_slurm_places.py -k test_a_job_in_containers
  fi
done
if command -v slurmctld >/dev/null; then
  echo "== $(slurmctld -V), 64 nodes"
  OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -p no:cacheprovider tests/functional/test_slurm_many_nodes.py
fi
