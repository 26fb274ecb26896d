"""The examples in ``--help``, by verb. The tests parse all of them."""

EXAMPLES = {
    "format": (
        "dlfs format photos.img --size 64GiB",
        "dlfs format /dev/nvme0n1,/dev/nvme1n1 --label photos",
        "dlfs format a.img,b.img --size 8GiB --replicas 2",
    ),
    "info": (
        "dlfs info photos.img",
        "dlfs info a.img,b.img --json",
        "dlfs info unix:/run/dlfs/photos.sock",
    ),
    "verify": (
        "dlfs verify photos.img",
        "dlfs verify photos.img photos@2 --json",
    ),
    "repair": (
        "dlfs repair a.img,b.img",
        "dlfs repair a.img --member 1 --with new.img",
    ),
    "grow": (
        "dlfs grow photos.img more.img --size 64GiB",
        "dlfs grow a.img,b.img /dev/nvme2n1 /dev/nvme3n1",
    ),
    "rebalance": (
        "dlfs rebalance photos.img",
        "dlfs rebalance a.img,b.img --json",
    ),
    "shrink": (
        "dlfs shrink photos.img,more.img photos.img",
        "dlfs shrink a.img,b.img,c.img 2 --json",
    ),
    "import": (
        "dlfs import photos photos.img --name photos",
        "dlfs import 'train-{000..099}.tar' photos.img -n train",
        "dlfs import cats dogs photos.img -n pets",
        "dlfs import new photos.img -n photos --append",
        "tar c photos | dlfs import - photos.img -n photos",
        "dlfs import x.h5 photos.img -n x --option select=x",
        "dlfs import --formats",
    ),
    "ls": (
        "dlfs ls photos.img",
        "dlfs ls -l photos.img photos dog",
        "dlfs ls -R -0 photos.img photos | xargs -0 -n 1 echo",
    ),
    "stat": (
        "dlfs stat photos.img photos",
        "dlfs stat photos.img photos dog/0001.jpg",
        "dlfs stat photos.img photos@1 --index -1 --json",
    ),
    "cat": (
        "dlfs cat photos.img photos dog/0001.jpg >dog.jpg",
        "dlfs cat photos.img photos --index 0 --index 1",
    ),
    "export": (
        "dlfs export photos.img photos copy",
        "dlfs export photos.img photos photos.tar.zst",
        "dlfs export photos.img photos@2 photos.arrow --force",
    ),
    "cp": (
        "dlfs cp photos.img photos copy.img",
        "dlfs cp unix:dlfs.sock photos@2 a.img,b.img pets",
    ),
    "diff": (
        "dlfs diff photos.img photos@1 photos@2",
        "dlfs diff photos.img photos photos --other copy.img --long",
    ),
    "du": (
        "dlfs du photos.img",
        "dlfs du photos.img photos --json",
    ),
    "mv": (
        "dlfs mv photos.img photos pets",
        "dlfs mv photos.img photos@1 photos-2025",
    ),
    "prune": (
        "dlfs prune photos.img photos --keep 3",
        "dlfs prune photos.img photos --keep 1 --yes",
    ),
    "rm": (
        "dlfs rm photos.img photos@1",
        "dlfs rm photos.img photos --all-versions --yes",
    ),
    "mount": (
        "dlfs mount photos.img /mnt/photos",
        "dlfs mount photos.img mnt --incoming staging",
        "dlfs mount photos.img sounds.img /mnt/data",
        "dlfs mount unix:/run/dlfs/photos.sock mnt --foreground",
        "dlfs mount --replace /mnt/photos",
    ),
    "umount": (
        "dlfs umount /mnt/photos",
        "dlfs umount --lazy /mnt/photos",
    ),
    "seal": (
        "dlfs seal mnt pets",
        "dlfs seal mnt pets --layout path --skip-links",
    ),
    "incoming": (
        "dlfs incoming mnt",
        "dlfs incoming mnt --discard pets",
    ),
    "top": (
        "dlfs top unix:/run/dlfs/photos.sock",
        "dlfs top unix:dlfs.sock --count 1 --json",
    ),
    "stall": (
        "dlfs stall photos.img photos",
        "dlfs stall photos.img photos --batch 64 --step-ms 50",
        "dlfs stall photos.img photos --plot stall.png",
    ),
    "serve": (
        "dlfs serve photos.img --socket dlfs.sock",
        "dlfs serve photos.img --cache 16GiB --mount mnt",
        "dlfs serve a.img b.img --metrics localhost:9100",
    ),
    "attach": ("dlfs attach unix:/run/dlfs/photos.sock b.img",),
    "detach": (
        "dlfs detach unix:/run/dlfs/photos.sock photos",
        "dlfs detach unix:dlfs.sock photos --force",
    ),
    "discover": (
        "dlfs discover 10.0.0.11",
        "dlfs discover storage-a:8009 --json",
        "dlfs discover storage-a --tls-psk psk",
    ),
    "target recipe": (
        "dlfs target recipe /dev/nvme1n1 -a 10.0.0.11 \\",
        "    --allow nqn.2024-01.org.example:trainer >export.sh",
    ),
    "target hostnqn": ("dlfs target hostnqn",),
    "key generate": ("dlfs key generate trainer", "dlfs key generate trainer --replace"),
    "key import": ("dlfs key import node1 </media/keys/node1",),
    "key identity": ("dlfs key identity psk -n nqn.2024-01.org.example:a",),
    "key list": ("dlfs key list", "dlfs key list --json"),
    "compose create": (
        "dlfs compose create a --size 64GiB --store /srv/nvme \\",
        "    -a 10.0.0.11 --allow nqn.2024-01.org.example:trainer",
    ),
    "compose ls": (
        "dlfs compose ls",
        "dlfs compose ls -t nvmet+ssh://root@10.0.0.11 --json",
    ),
    "compose resize": ("dlfs compose resize a 128GiB -t spdk",),
    "compose withdraw": (
        "dlfs compose withdraw a",
        "dlfs compose withdraw --all --delete -t spdk",
    ),
    "uri": (
        "dlfs uri",
        "dlfs uri nvme-tcp://10.0.0.5/nqn.2024-01.org.example:a",
    ),
    "version": (
        "dlfs version",
        "dlfs version --json",
    ),
}
