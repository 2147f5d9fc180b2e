/** Names of video devices. */
import type { Video } from '../api/types';

export const VIDEO_NAMES: Record<Video, string> = {
  none: 'None, serial console only',
  vga: 'VGA',
  virtio: 'virtio',
};
