//! Bounds that all stores share.

/// Most keys that one transaction may check, and most that it may write. etcd allows 128
/// operations; the leadership is one.
pub const MOST_KEYS: usize = 120;
/// Most bytes of keys and values that one transaction may write. etcd accepts requests of 1.5 MiB;
/// the rest is for the encoding.
pub const MOST_TRANSACTION_BYTES: usize = 1 << 20;
/// Most bytes of a value. Others fit into the transaction beside it, and a whole page of such
/// values can still be read.
pub const MOST_VALUE_BYTES: usize = 768 << 10;
pub const MOST_KEY_BYTES: usize = 512;
/// Most items of a page.
pub const MOST_PAGE_ITEMS: usize = 256;
