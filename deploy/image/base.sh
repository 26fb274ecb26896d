#!/bin/bash
# Makes the base of the image from Debian's packages, where no registry is reachable: base.sh ARCHIVE, as root. The archive has
# the files of debian:bookworm-slim: no documentation, no locales, no lists of packages.
set -eu -o pipefail
archive=$1
suite=bookworm
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
security=${DEBIAN_SECURITY_MIRROR:-http://deb.debian.org/debian-security}
root=$(mktemp -d "${TMPDIR:-/tmp}/dlfs-base.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT

debootstrap --variant=minbase "$suite" "$root" "$mirror" >"$archive.log" || { tail "$archive.log"; exit 1; }
cat >"$root/etc/apt/sources.list" <<END
deb $mirror $suite main
deb $mirror $suite-updates main
deb $security $suite-security main
END
{
    for folder in doc groff info linda lintian locale man; do echo "path-exclude /usr/share/$folder/*"; done
    echo "path-include /usr/share/doc/*/copyright"
} >"$root/etc/dpkg/dpkg.cfg.d/docker"
{
    echo 'APT::Update::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };'
    echo 'Acquire::Languages "none";'
} >"$root/etc/apt/apt.conf.d/docker"
# Services are not started in a container that is being built.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
chroot "$root" sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get upgrade -qq --yes' >>"$archive.log" 2>&1 ||
    { tail "$archive.log"; exit 1; }

find "$root/usr/share/doc" -mindepth 2 -not -name copyright -not -type d -delete
find "$root/usr/share/doc" -depth -type d -empty -delete
rm -rf "$root"/usr/share/{groff,info,linda,lintian,locale,man}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/{apt,debconf,ldconfig}/* \
    "$root"/var/log/* "$root"/var/lib/dpkg/*-old "$root"/tmp/* "$root"/run/*
: >"$root/etc/machine-id"
rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
tar --create --file "$archive" --directory "$root" --numeric-owner --one-file-system --exclude './dev/*' --exclude './proc/*' \
    --exclude './sys/*' .
