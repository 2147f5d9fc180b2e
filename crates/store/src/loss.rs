//! How leaderships end.

/// How a leadership ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The manager resigned.
    Resigned,
    /// The store could not renew the leadership in time.
    RanOut,
    /// The store reports that the leadership has ended.
    Ended,
    /// The store can no longer be written.
    StoreFailed(String),
}

impl std::fmt::Display for Loss {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Loss::Resigned => out.write_str("it has resigned"),
            Loss::RanOut => out.write_str("the store did not renew its leadership in time"),
            Loss::Ended => {
                out.write_str("its leadership has ended in the store, and another manager may lead")
            }
            Loss::StoreFailed(why) => write!(out, "the store can no longer be written: {why}"),
        }
    }
}
