/** The mark of the project. */
export const Bird = () => (
  <svg class="bird" viewBox="0 0 32 32" width="22" height="22" aria-hidden="true">
    <rect width="32" height="32" rx="7" class="bird-ground" />
    <path
      class="bird-shape"
      d="M5 21.5c5.5 0 8.2-1.6 10.4-5.6C17.3 12.4 19.6 10 23 10c2 0 3.3.9 4 2.3L22.6 13.1C21.8 19 18.5 24 11.5 24c-2.8 0-5-.9-6.5-2.5Z"
    />
    <circle cx="22.7" cy="11.8" r=".9" class="bird-ground" />
  </svg>
);
