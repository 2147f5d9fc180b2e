//! A QEMU that another program started, read from its arguments: what Godwit's specification can
//! say of it, and its topology. Pure. The arguments come from another process, whose guest may have
//! taken it over: they are bounded, and a part that is not known refuses the adoption by its name.
//! Whether a file that they name may be opened is the caller's question.

mod drives;
mod read;

pub use read::{ForeignFirmware, ForeignNic, ForeignTap, ForeignVm, read_foreign};

/// Most arguments that are read.
pub(crate) const MOST_ARGUMENTS: usize = 4096;
/// Most bytes of all arguments together (`ARG_MAX` of Linux is 2 MiB by default).
pub const MOST_ARGUMENTS_BYTES: usize = 4 << 20;
