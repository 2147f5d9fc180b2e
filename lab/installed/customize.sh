#!/usr/bin/env bash
# Configures the tree of the installed image: customize.sh TREE ROOT_UUID
set -euo pipefail
tree=$1 root_uuid=$2

echo debian > "$tree/etc/hostname"
echo "UUID=$root_uuid / ext4 errors=remount-ro 0 1" > "$tree/etc/fstab"
# As an installer does, with a console on the screen and one on the serial line.
mkdir -p "$tree/boot/grub"
cat > "$tree/boot/grub/grub.cfg" << END
set timeout=1
menuentry "Debian 12" {
  linux /vmlinuz root=UUID=$root_uuid ro console=tty0 console=ttyS0 net.ifnames=0
  initrd /initrd.img
}
END
# The only source of settings is the disk that Godwit makes.
cat > "$tree/etc/cloud/cloud.cfg.d/90_lab.cfg" << END
datasource_list: [NoCloud, None]
system_info:
  network:
    renderers: [networkd]
END
chroot "$tree" systemctl --quiet enable systemd-networkd.service ssh.service
# Nothing waits for a network without an answer, or starts in the middle of a measurement.
chroot "$tree" systemctl --quiet mask systemd-networkd-wait-online.service \
  apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer
rm -f "$tree"/etc/ssh/ssh_host_*
: > "$tree/etc/machine-id"
