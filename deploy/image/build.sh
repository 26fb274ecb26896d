#!/bin/bash
# Builds images by deploy/image/Containerfile without a registry, as root: build.sh WHEEL BASE.tar FOLDER TARGET...
# Each TARGET, a stage of the Containerfile, becomes FOLDER/TARGET.tar for podman load, named localhost/TARGET:VERSION, and its list of
# parts FOLDER/TARGET.sbom.json. Images are built in a store of their own, so that it does not matter how podman is set up.
set -eu -o pipefail
wheel=$1 base=$2 folder=$3
shift 3
version=$(basename "$wheel" | cut -d- -f2)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/dlfs-image.XXXXXX")
buildah=(buildah --root "$scratch/store" --runroot "$scratch/run" --storage-driver vfs)
trap '"${buildah[@]}" rm --all >/dev/null 2>&1 || true; rm -rf --one-file-system "$scratch"' EXIT

# What pip needs here to reach its index is given to the build, and stays in no layer.
certificates=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}
index=$(python3 -m pip config get global.index-url 2>/dev/null || true)
{
    echo "[global]"
    echo "cert = /run/secrets/ca"
    if [ -n "$index" ]; then echo "index-url = $index"; fi
} >"$scratch/pip.conf"

container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add --quiet "$container" "$base" / >/dev/null
"${buildah[@]}" config --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
"${buildah[@]}" commit --quiet --rm "$container" localhost/dlfs-base >/dev/null

for target in "$@"; do
    "${buildah[@]}" build --quiet --layers --isolation chroot --network host --format docker --file deploy/image/Containerfile --target "$target" \
        --build-arg BASE=localhost/dlfs-base --build-arg "WHEEL=$wheel" --build-arg "VERSION=$version" \
        --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
        --secret "id=pip.conf,src=$scratch/pip.conf" --secret "id=ca,src=$certificates" \
        --tag "localhost/$target:$version" . >"$folder/$target.log" 2>&1 || { tail -40 "$folder/$target.log"; exit 1; }
    rm -f "$folder/$target.tar"
    "${buildah[@]}" push --quiet "localhost/$target:$version" "docker-archive:$folder/$target.tar:localhost/$target:$version"
    container=$("${buildah[@]}" from "localhost/$target:$version")
    cp "$("${buildah[@]}" mount "$container")/opt/dlfs/sbom.json" "$folder/$target.sbom.json"
    "${buildah[@]}" rm "$container" >/dev/null
    echo "$folder/$target.tar: localhost/$target:$version, $(($(stat --format %s "$folder/$target.tar") / 1000000)) MB"
done
