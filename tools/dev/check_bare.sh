#!/usr/bin/env bash
# ./dev check-bare [--keep] [--warm] [test|demo|walk …]: makes a bare Debian 12 with debootstrap and runs the README's commands
# in a clean clone there, as a new user would. The mirrors, certificates and pip options of this machine are handed in;
# nothing else is; --warm lends this machine's compiler cache too, which saves most of the time to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/dev/common.sh
[ "$(id -u)" = 0 ] || die "check-bare makes a system in a folder and needs root"
command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq debootstrap

keep=0; warm=""; verbs=()
for argument in "$@"; do
  case "$argument" in
    --keep) keep=1 ;;
    --warm) warm=$(ccache --get-config cache_dir) || die "--warm lends ccache's folder, and there is no ccache here"
      mkdir -p "$warm" ;;  # an installed ccache makes it with its first file
    *) verbs+=("$argument") ;;
  esac
done
[ ${#verbs[@]} -gt 0 ] || verbs=(demo test walk)

root="${TMPDIR:-/var/tmp}/paceline-bare-$$"
cleanup() { [ "$keep" = 1 ] && say "kept: $root" || rm -rf --one-file-system "$root"; }
trap cleanup EXIT
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -1)
say "making a bare Debian 12 in $root"
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$mirror" >"$root.log" 2>&1 ||
  { tail -5 "$root.log"; die "debootstrap failed"; }
rm -f "$root.log"
rm -rf "$root/etc/apt"; cp -a /etc/apt "$root/etc/apt"
cp -a /etc/ssl/certs "$root/etc/ssl/"; cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
[ -d /usr/local/share/ca-certificates ] && cp -a /usr/local/share/ca-certificates "$root/usr/local/share/"
git clone -q . "$root/src"

# A mount and process namespace of its own: nothing that runs in there outlives it or sees this machine's mounts. Its
# root is pivoted: in a chroot the kernel allows no user namespaces.
inside='mount --bind "$0" "$0"; cd "$0"
for fs in proc:proc sysfs:sys; do mount -t ${fs%%:*} ${fs%%:*} ${fs##*:}; done
[ -z "$2" ] || { mkdir -p root/.cache/ccache && mount --bind "$2" root/.cache/ccache; }
mount --rbind /dev dev; mount -t tmpfs tmpfs run; mkdir -p run/netns
mkdir -p .outside; pivot_root . .outside; cd /; umount -l /.outside; rmdir /.outside
exec /usr/bin/env -i HOME=/root TERM=dumb CI="${CI:-}" LANG=C.UTF-8 \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin $(env | grep -E "^(PIP_|https?_proxy=|no_proxy=)" | grep -v FIND_LINKS | tr "\n" " ") \
  /bin/bash -c "cd /src && ./dev $1"'
for verb in "${verbs[@]}"; do
  say "./dev $verb, in there"
  started=$SECONDS
  unshare --mount --pid --fork --propagation private bash -ec "$inside" "$root" "$verb" "$warm"
  say "./dev $verb took $((SECONDS - started)) s"
done
