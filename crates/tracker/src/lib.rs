//! The library preloaded into QEMU: hands out a userfaultfd, keeps a copy of one, nothing else.
//!
//! A userfaultfd belongs to the address space that created it, so QEMU itself has to create the one that tracks QEMU's
//! memory. The agent starts QEMU with `LD_PRELOAD` naming this library and with a listening unix socket inherited
//! (`GODWIT_TRACKER_FD`). The constructor takes its variables and `LD_PRELOAD` out of the environment, so that nothing
//! QEMU starts inherits them, and starts one thread with every signal blocked. The thread answers the one uid it was
//! told (`GODWIT_TRACKER_PEER_UID`, the process's own where absent): a userfaultfd for each request. Of one it keeps a copy
//! when it is asked to, until it is asked to close it or for another: what the userfaultfd governs then stays governed when
//! the agent dies, and the next agent gets the copy.
//!
//! It sources the userfaultfd from, in this order: the open /dev/userfaultfd that came with the request, so that an
//! unprivileged QEMU never holds the device; the device opened by the constructor (`GODWIT_TRACKER_OPEN=1`, for a QEMU
//! that starts as root and drops its privileges); the system call; the system call for user-mode faults only.
//!
//! It runs inside somebody else's process: it never panics, never writes to QEMU's standard streams, changes no signal
//! handler, and on anything unexpected does without. It must not know what the descriptor is used for.
#![allow(unsafe_code, reason = "a constructor in a foreign process has system calls to make and little else")]

mod constructor;
pub mod protocol;
mod serve;
