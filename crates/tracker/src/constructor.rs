//! Steps at QEMU's start, before its `main`: read the settings, clean the environment, start the
//! thread.

use std::ffi::{CStr, CString, c_void};
use std::os::fd::RawFd;
use std::ptr;

use crate::protocol::{ENV_LISTENER, ENV_OPEN, ENV_PEER_UID};
use crate::serve::{Server, run};

/// The thread needs a few hundred bytes; glibc takes its thread-local storage from the same place.
const STACK_BYTES: usize = 256 << 10;

#[used]
// SAFETY: the section holds pointers to functions of the C ABI that the loader calls with (argc,
// argv, envp). A function without arguments may be called this way on every architecture that Linux
// runs on.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = construct;

extern "C" fn construct() {
    let Some(listener) = number_from_environment(ENV_LISTENER) else {
        return;
    };
    // SAFETY: getuid has no failure and touches no memory.
    let own_uid = unsafe { libc::getuid() };
    let peer_uid = number_from_environment(ENV_PEER_UID).unwrap_or(own_uid);
    let open_device = number_from_environment(ENV_OPEN) == Some(1);
    for name in [ENV_LISTENER, ENV_PEER_UID, ENV_OPEN, "LD_PRELOAD"] {
        remove_from_environment(name);
    }
    let Ok(listener) = RawFd::try_from(listener) else {
        return;
    };
    // SAFETY: fcntl on a number that is not a descriptor fails with EBADF and does nothing else.
    if unsafe { libc::fcntl(listener, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return;
    }
    let device = open_device.then(open_userfaultfd_device).flatten();
    start_thread(Server { listener, device, peer_uid });
}

fn number_from_environment(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: the name ends in NUL. The value stays in place: constructors run before QEMU has a
    // thread that could change the environment.
    let value = unsafe {
        let value = libc::getenv(name.as_ptr());
        if value.is_null() {
            return None;
        }
        CStr::from_ptr(value)
    };
    value.to_str().ok()?.parse().ok()
}

fn remove_from_environment(name: &str) {
    if let Ok(name) = CString::new(name) {
        // SAFETY: the name ends in NUL, and no other thread reads the environment yet.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
}

fn open_userfaultfd_device() -> Option<RawFd> {
    // SAFETY: the path is a constant that ends in NUL.
    let fd = unsafe { libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    (fd >= 0).then_some(fd)
}

/// Starts the thread with all signals blocked, so that QEMU's signals reach only QEMU's threads.
/// glibc excludes from the mask the two signals that it needs itself (cancellation and setuid
/// across threads).
fn start_thread(server: Server) {
    let argument = Box::into_raw(Box::new(server)).cast::<c_void>();
    // SAFETY: the calls initialise the sets, the attributes and the thread's ID before these are
    // read. `argument` belongs to the thread once it has started, and to this function if it has
    // not.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        let masked = libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) == 0;
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let mut started = false;
        if masked && libc::pthread_attr_init(&raw mut attributes) == 0 {
            libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
            libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES);
            started =
                libc::pthread_create(&raw mut thread, &raw const attributes, thread_main, argument)
                    == 0;
            libc::pthread_attr_destroy(&raw mut attributes);
        }
        if masked {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        }
        if started {
            libc::pthread_setname_np(thread, c"godwit-tracker".as_ptr());
        } else {
            drop(Box::from_raw(argument.cast::<Server>()));
        }
    }
}

extern "C" fn thread_main(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `argument` comes from Box::into_raw in start_thread, which gave up its ownership.
    let server = unsafe { Box::from_raw(argument.cast::<Server>()) };
    run(&server);
    ptr::null_mut()
}
