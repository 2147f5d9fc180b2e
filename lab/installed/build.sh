#!/usr/bin/env bash
# Builds the disk image of an installed Debian 12 from the distribution's packages: systemd, GRUB
# for UEFI in an EFI partition, cloud-init, the guest agent and a kernel with all drivers. The
# result is out/guest/installed/debian-12.qcow2; it is built again when a script here changes.
#   lab/installed/build.sh        needs root, mmdebstrap and the packages of `scripts/deps --image`
# No loop device and no mount is used: the file systems are written as files and put together.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=out/guest/installed
IMAGE=$OUT/debian-12.qcow2
# Sectors of 512 bytes: the EFI partition begins after 1 MiB, the root after it.
EFI_START=2048 EFI_SECTORS=$((64 * 2048)) ROOT_MIB=2400
ROOT_START=$((EFI_START + EFI_SECTORS))
ROOT_UUID=6f2a3e0c-7a4e-4bb1-9d53-0d57c1b5a001
PACKAGES=systemd-sysv,systemd-timesyncd,udev,dbus,kmod,iproute2,iputils-ping,openssh-server,sudo
PACKAGES+=,cloud-init,qemu-guest-agent,linux-image-amd64,initramfs-tools,zstd,grub-efi-amd64-bin
PACKAGES+=,ca-certificates,less

say() { echo "image: $*"; }

made_of=$(cat lab/installed/*.sh | sha256sum | cut -d ' ' -f 1)
if [ -e "$IMAGE" ] && [ "$(cat "$OUT/made-of" 2>/dev/null)" = "$made_of" ]; then
  say "$IMAGE is up to date"
  exit
fi
mkdir -p "$OUT"
exec 9> "$OUT/lock"
flock 9
work=$(mktemp -d "$PWD/$OUT/work.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
# Root of the guest: its files must not be below a directory that others cannot enter.
chmod 755 "$work"
tree=$work/tree

install_packages() {
  say "installing the packages; this takes some minutes"
  local source=/etc/apt/sources.list.d/debian.sources
  grep -qs bookworm "$source" || source=http://deb.debian.org/debian
  # Proxies and other settings of this machine's apt also apply to the download.
  apt-config dump | grep '^Acquire::' > "$work/apt.conf" || true
  mmdebstrap --mode=root --variant=minbase --quiet --include="$PACKAGES" \
    --aptopt="$work/apt.conf" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"' \
    --essential-hook='echo MODULES=list > "$1/etc/initramfs-tools/conf.d/modules"' \
    --essential-hook='printf "%s\n" virtio_pci virtio_blk virtio_scsi ahci sd_mod sr_mod ext4 \
      > "$1/etc/initramfs-tools/modules"' \
    --customize-hook="lab/installed/customize.sh \"\$1\" $ROOT_UUID" \
    bookworm "$tree" "$source" 2> "$work/errors" || {
      tail -n 20 "$work/errors" >&2
      exit 1
    }
}

make_boot_loader() {
  # The boot loader finds the root by its UUID, whatever bus it is on.
  printf '%s\n' "search --no-floppy --fs-uuid --set=root $ROOT_UUID" \
    'set prefix=($root)/boot/grub' 'configfile $prefix/grub.cfg' > "$tree/tmp/early.cfg"
  chroot "$tree" grub-mkstandalone --format=x86_64-efi --output=/tmp/BOOTX64.EFI \
    --modules='part_gpt ext2 search search_fs_uuid configfile linux normal serial terminal' \
    --locales= --fonts= --themes= boot/grub/grub.cfg=/tmp/early.cfg
  mv "$tree/tmp/BOOTX64.EFI" "$work/"
  rm "$tree/tmp/early.cfg"
}

assemble() {
  say "writing the file systems"
  truncate -s $((EFI_SECTORS * 512)) "$work/efi"
  mkfs.vfat -n EFI "$work/efi" > /dev/null
  mmd -i "$work/efi" ::/EFI ::/EFI/BOOT
  mcopy -i "$work/efi" "$work/BOOTX64.EFI" ::/EFI/BOOT/BOOTX64.EFI
  truncate -s ${ROOT_MIB}M "$work/root"
  mke2fs -q -t ext4 -F -U "$ROOT_UUID" -L root -E root_owner=0:0 -d "$tree" "$work/root"
  truncate -s $((ROOT_START / 2048 + ROOT_MIB + 1))M "$work/disk"
  sfdisk --quiet "$work/disk" << END
label: gpt
start=$EFI_START, size=$EFI_SECTORS, type=uefi, name=efi
start=$ROOT_START, size=$((ROOT_MIB * 2048)), type=linux, name=root
END
  dd if="$work/efi" of="$work/disk" bs=1M seek=$((EFI_START / 2048)) conv=notrunc,sparse status=none
  dd if="$work/root" of="$work/disk" bs=1M seek=$((ROOT_START / 2048)) conv=notrunc,sparse \
    status=none
  qemu-img convert -O qcow2 "$work/disk" "$work/image"
  mv "$work/image" "$IMAGE"
  # Written last: it marks a complete image.
  echo "$made_of" > "$OUT/made-of"
}

install_packages
make_boot_loader
assemble
say "$IMAGE: $(du -h "$IMAGE" | cut -f 1)"
