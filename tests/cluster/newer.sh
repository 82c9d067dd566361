#!/bin/sh
# newer.sh DIRECTORY: Docker and containerd of Debian sid below DIRECTORY/root, and in DIRECTORY/bin copies that find
# their own loader and libraries there. Debian 12 has Docker 20.10, which knows no CDI devices. Needs mmdebstrap, patchelf.
set -eu
directory=$(realpath -m "$1")
patchelf=${PATCHELF:-patchelf}
[ ! -x "$directory/bin/ctr" ] || exit 0
rm -rf "$directory"
mkdir -p "$directory"
# A mirror may be a snapshot whose files have expired.
mmdebstrap --quiet --variant=extract --aptopt='Acquire::Check-Valid-Until "false"' \
    --include=docker.io,containerd,runc,docker-cli sid "$directory/root"
mkdir "$directory/bin.new"
libraries=$directory/root/usr/lib/$(uname -m)-linux-gnu
loader=$(find "$directory"/root/usr/lib64 "$directory"/root/usr/lib -name 'ld-linux-*.so.*' | head -n 1)
for name in sbin/dockerd bin/containerd bin/containerd-shim-runc-v2 bin/ctr sbin/runc bin/docker; do
    copy=$directory/bin.new/${name##*/}
    cp "$directory/root/usr/$name" "$copy"
    if "$patchelf" --print-interpreter "$copy" >/dev/null 2>&1; then
        "$patchelf" --set-interpreter "$loader" --set-rpath "$libraries" "$copy"
    fi
done
mv "$directory/bin.new" "$directory/bin"
