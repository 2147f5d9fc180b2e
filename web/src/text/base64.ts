/** Base64url without padding (RFC 4648, section 5), of a text in Latin 1. */
export function base64Url(text: string): string {
  return btoa(text).replace(/\+/g, '-').replace(/\//g, '_').replace(/=+$/, '');
}
