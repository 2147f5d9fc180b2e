//! The library preloaded into QEMU: it hands out a userfaultfd and keeps a copy of one, nothing
//! else.
//!
//! A userfaultfd belongs to the address space that created it, so QEMU itself has to create the one
//! that tracks QEMU's memory. The agent starts QEMU with `LD_PRELOAD` naming this library and with
//! an inherited, listening unix socket (`GODWIT_TRACKER_FD`). The constructor removes its variables
//! and `LD_PRELOAD` from the environment, so that programs started by QEMU do not inherit them. It
//! starts one thread with every signal blocked. The thread answers only one uid
//! (`GODWIT_TRACKER_PEER_UID`, by default the process's own), with one userfaultfd per request.
//!
//! On request the library keeps a copy of a userfaultfd, until a request to close it or to keep
//! another. The memory that the userfaultfd governs then stays governed if the agent dies, and the
//! next agent obtains the copy.
//!
//! The userfaultfd comes from the first of these sources that works:
//!
//! 1. the open /dev/userfaultfd that came with the request, so that an unprivileged QEMU never
//!    holds the device;
//! 2. the device opened by the constructor (`GODWIT_TRACKER_OPEN=1`, for a QEMU that starts as root
//!    and drops its privileges);
//! 3. the system call;
//! 4. the system call for user-mode faults only.
//!
//! The library runs inside a foreign process. It never panics, never writes to QEMU's standard
//! streams, changes no signal handler, and does without on anything unexpected. It must not know
//! what the descriptor is used for.
#![allow(
    unsafe_code,
    reason = "a constructor in a foreign process has system calls to make and little else"
)]

mod constructor;
pub mod protocol;
mod serve;
