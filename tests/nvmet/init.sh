#!/bin/busybox sh
# Process 1 of a guest: the modules, the network; here it is stored (guest.py). Then its files, its
# disks, and /script, whose output goes to the second serial port, followed by a line with its exit
# code. Then nothing: the guest serves, or is killed.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
while read -r module; do
    options=
    [ "$module" = virtio_blk.ko ] && continue
    [ "$module" = brd.ko ] && options="rd_nr=2 rd_size=65536"
    insmod "/modules/$module" $options || echo "insmod $module failed"
done </modules/order
mount -t configfs none /sys/kernel/config
ip link set lo up
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
ip route add default via 10.0.2.2
# Connections that the emulator forwards come for 127.0.0.1, so that the addresses the target
# tells in its discovery log are those it has on the host.
echo 1 >/proc/sys/net/ipv4/conf/eth0/route_localnet
stty -F /dev/ttyS1 raw -echo
echo GUEST-BOOTED >/dev/ttyS1
until tftp -g -r files -l /files 10.0.2.2 2>/dev/null; do usleep 20000; done
tar -xf /files -C /
insmod /modules/virtio_blk.ko
{
    (cd /tmp && exec sh /script)
    printf '\nGUEST-EXIT %d\n' $?
} >/dev/ttyS1 2>&1 </dev/null
dmesg | tail -n 40
while :; do sleep 3600; done
